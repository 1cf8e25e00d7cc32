"""Where answers come from: what a question may ask of a recording, kept or lean."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from ..forms import Form, Norms

Forms = Mapping[str, Form]
Grads = dict[str, Tensor]
Lengths = dict[str, list[Norms]]  # of each parameter and its pieces
Visitor = Callable[[str, Form], None]


class Source(abc.ABC):
    """A recording, as its questions see it.

    What was ``found`` in advance is None if nothing was: then the forms are queried.
    """

    keeps: bool  # whether every form is at hand

    @abc.abstractmethod
    def ready(self) -> None:
        """Refuse to answer from a recording that is not complete, or no longer true."""

    @abc.abstractmethod
    def norms(self, names: Iterable[str], *, separate: bool) -> Lengths:
        """Norms of parameters, to be added up; ``separate``: of each that received a gradient."""

    @abc.abstractmethod
    def clipping_norms(self, names: Iterable[str], forms: Forms | None) -> Lengths:
        """Norms of :meth:`clipping_forms` forms."""

    @abc.abstractmethod
    def clipping_forms(
        self, names: Iterable[str], *, separate: bool
    ) -> contextlib.AbstractContextManager[Forms | None]:
        """Forms for norms and one sum; None where nothing is kept."""

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
    def forms(self, names: Iterable[str]) -> dict[str, Form]:
        """One form per parameter that received a gradient; refused where nothing is kept."""
