"""Where answers come from: what a question may ask of a recording, kept or lean."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import UsageError
from ..forms import Form
from ..uses.context import Context

Forms = Mapping[str, Form]
Grads = dict[str, Tensor]
Names = Sequence[Sequence[str]]  # groups of parameters
Visitor = Callable[[str, Form], None]


class Source(abc.ABC):
    """A recording, as its questions see it.

    What was ``found`` in advance is None if nothing was: then the forms are queried.
    """

    keeps: bool  # whether every form is at hand

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def n(self) -> int:
        """How many samples were seen."""
        n = self._context.n
        if n is None:
            raise UsageError(
                "no samples were seen",
                why="the model was not called inside the block",
                fix="call the model on its inputs inside the block, or tape.mark(x)",
            )
        return n

    @property
    def device(self) -> torch.device:
        """Where answers are added up."""
        return next(iter(self._context.parameters.asked.values())).device

    @abc.abstractmethod
    def ready(self) -> None:
        """Refuse to answer from a recording that is not complete, or no longer true."""

    @abc.abstractmethod
    def sq_norms(self, groups: Names) -> Tensor:
        """‖gᵢ‖² over groups of parameters: (groups, n)."""

    @abc.abstractmethod
    def bounds(self, groups: Names, elements: int) -> tuple[Forms | None, Tensor]:
        """Forms for one sum, and certified bounds of ‖gᵢ‖² over groups; None if nothing is kept.

        Asked when the recording is :meth:`ready`.
        """

    @abc.abstractmethod
    def weighted_sums(self, names: Sequence[str], c: Tensor, *, last: bool) -> Grads:
        """Σ cᵢ gᵢ of parameters that received a gradient."""

    @abc.abstractmethod
    def certain_sums(
        self, names: Sequence[str], forms: Forms | None, c: Grads, bad: Tensor | None
    ) -> Grads:
        """The last question: Σ cᵢ gᵢ from what :meth:`bounds` came from, without ``bad`` samples.

        Uses that cancel are added as they were for the bounds: before they are scaled.
        """

    @abc.abstractmethod
    def each(self, names: Sequence[str], visit: Visitor, *, linear: bool, last: bool) -> None:
        """Show the form of every parameter that received a gradient to a visitor.

        Where the question is ``linear``, a parameter may come use by use. The ``last`` question may
        free the graph.
        """

    def found_grads(self, names: Sequence[str]) -> Grads | None:
        """Rows that the first pass wrote out, given away."""
        return None

    def found_dots(self, direction: Mapping[str, Tensor], names: Sequence[str]) -> Grads | None:
        """⟨gᵢ, V⟩ of parameters, if the first pass took them."""
        return None

    def found_projections(self, wanted: tuple[int, int]) -> list[Tensor] | None:
        """Projections (dim, seed), if the first pass took them."""
        return None

    def found_moments(self) -> tuple[Grads, Grads, Grads] | None:
        """Sums, sums of squares and variances, if the first pass took them."""
        return None

    @abc.abstractmethod
    def forms(self, names: Collection[str]) -> dict[str, Form]:
        """One form per parameter that received a gradient; refused where nothing is kept."""
