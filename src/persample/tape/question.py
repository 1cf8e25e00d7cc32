"""What every question of a tape starts from: a recording that answers."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import MixedSamplesError, Reason, StaleError, UsageError
from ..forms import LIMIT, Form, real
from ..run_state import uncast
from ..uses import Context, Params, choose

Forms = Mapping[str, Form]
Grads = dict[str, Tensor]
Names = Sequence[Sequence[str]]  # groups of parameters
Visitor = Callable[[str, Form], None]


class Question(abc.ABC):
    """A recording, open for queries; each is answered inside :meth:`answering`.

    What was ``found`` in advance is None if nothing was: then the forms are queried.
    """

    keeps: bool  # whether every form is at hand

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.RLock()  # questions of a lean recording back-propagate

    # ------------------------------------------------------------------ where answers come from

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
    def each(
        self, names: Sequence[str], visit: Visitor, *, linear: bool = False, last: bool = False
    ) -> None:
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

    # ------------------------------------------------------------------ how they are asked for

    @contextlib.contextmanager
    def answering(self) -> Iterator[Question]:
        """Unseen by any recorder, uncast, one thread at a time, within the memory budget."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UsageError(
                "a tape cannot be queried inside a torch.func transform",
                why="its answers carry no gradient, and are not batched",
                fix="ask outside, and use the answer inside",
            )
        budget = LIMIT.set(self._context.options.budget)
        try:
            with self._lock, torch._C.DisableTorchFunction(), uncast():
                yield self
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise StaleError(
                "something that was recorded was overwritten in place",
                why=f"autograd says: {str(error).partition(' Hint')[0]}",
                fix="ask the tape before parameters, buffers, labels or masks are written to",
            ) from error
        finally:
            LIMIT.reset(budget)

    @property
    def selected(self) -> Mapping[str, Tensor]:
        """The recorded parameters, by name."""
        return self._context.parameters.asked

    def names(self, params: Params) -> list[str]:
        """The names that ``params=`` selects."""
        return choose(params, self.selected)

    @property
    def extracted(self) -> Reason | None:
        """A number of several samples that left torch before the losses were computed."""
        return self._context.backward.extracted

    def expect_losses(self, question: str) -> None:
        """Refuse questions that need one loss per sample."""
        self.ready()
        backward = self._context.backward
        if backward.scalar:
            raise UsageError(
                f"{question} needs one loss per sample",
                why="a mean, a sum or weighted losses were back-propagated: rows are not gᵢ",
                fix="tape.backward(losses) with a vector of losses",
            )
        if backward.coupled is not None:
            raise MixedSamplesError(
                f"{question}: the losses are scaled by a number taken from the whole batch",
                where=backward.coupled.where(),
                why="one sample changes the scale of all others, so no bound holds",
                fix="divide by a constant, or by something of each sample's own",
            )
        if not backward.apart:
            raise MixedSamplesError(
                f"{question}: this tape was computed one loss at a time, unproven",
                why="samples may influence each other's losses, so a bound would mean nothing",
                fix="use a model that persample can prove",
            )

    # ------------------------------------------------------------------ what several ask

    def parameter_norms(self, names: Sequence[str]) -> Grads:
        """‖gᵢ‖ of each parameter."""
        sizes = self.sq_norms([[name] for name in names]).sqrt()
        like = [self.selected[name] for name in names]
        return {
            name: size.to(parameter.device, real(parameter.dtype))
            for name, parameter, size in zip(names, like, sizes, strict=True)
        }

    def weighted_sum(
        self, names: Sequence[str], c: Tensor, *, wide: bool = False, last: bool = False
    ) -> Grads:
        """Σ cᵢ gᵢ; ``wide``: in float32 at least."""
        return self.cast(names, self.weighted_sums(names, c, last=last), wide=wide)

    def cast(self, names: Sequence[str], found: Grads, *, wide: bool) -> Grads:
        """Sums in the dtypes of their parameters, or float32 at least; zeros where none came."""
        selected = self.selected
        return {name: _cast(selected[name], found.get(name), wide=wide) for name in names}


def _cast(parameter: Tensor, value: Tensor | None, *, wide: bool) -> Tensor:
    """A sum in its parameter's dtype; zeros where no gradient came."""
    dtype = _widened(parameter.dtype) if wide else parameter.dtype
    if value is None:
        return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    return value if value.dtype is dtype else value.to(dtype)


@functools.cache
def _widened(dtype: torch.dtype) -> torch.dtype:
    """Float32 at least."""
    return torch.promote_types(dtype, torch.float32)
