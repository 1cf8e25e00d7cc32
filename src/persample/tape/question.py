"""What every question of a tape starts from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import MixedSamplesError, Reason, StaleError, UsageError
from ..forms import LIMIT, real
from ..run_state import uncast
from ..uses.context import Context
from ..uses.parameters import Params, choose
from .source import Grads, Source, Visitor


class Question:
    """A recording, open for queries; each is answered inside :meth:`answering`."""

    def __init__(self, context: Context, source: Source) -> None:
        self._context, self.source = context, source
        self._lock = threading.RLock()  # questions of a lean recording back-propagate

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

    # ------------------------------------------------------------------ what there is

    @property
    def n(self) -> int:
        """How many samples were seen."""
        return self.source.n

    @property
    def selected(self) -> Mapping[str, Tensor]:
        """The recorded parameters, by name."""
        return self._context.parameters.asked

    def names(self, params: Params) -> list[str]:
        """The names that ``params=`` selects."""
        return choose(params, self.selected)

    @property
    def device(self) -> torch.device:
        """Where answers are added up."""
        return self.source.device

    @property
    def extracted(self) -> Reason | None:
        """A number of several samples that left torch before the losses were computed."""
        return self._context.backward.extracted

    def expect_losses(self, question: str) -> None:
        """Refuse questions that need one loss per sample."""
        self.source.ready()
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

    def each(
        self, names: Sequence[str], visit: Visitor, *, linear: bool = False, last: bool = False
    ) -> None:
        """Show the form of every parameter that received a gradient to a visitor."""
        self.source.each(names, visit, linear=linear, last=last)

    def sq_norms(self, names: Sequence[str]) -> Tensor:
        """‖gᵢ‖² over parameters."""
        return self.source.sq_norms([names])[0]

    def parameter_norms(self, names: Sequence[str]) -> Grads:
        """‖gᵢ‖ of each parameter."""
        sizes = self.source.sq_norms([[name] for name in names]).sqrt_()
        like = [self.selected[name] for name in names]
        return {
            name: size.to(parameter.device, real(parameter.dtype))
            for name, parameter, size in zip(names, like, sizes, strict=True)
        }

    def weighted_sum(
        self, names: Sequence[str], c: Tensor, *, wide: bool = False, last: bool = False
    ) -> Grads:
        """Σ cᵢ gᵢ; ``wide``: in float32 at least."""
        return self.cast(names, self.source.weighted_sums(names, c, last=last), wide=wide)

    def cast(self, names: Sequence[str], found: Grads, *, wide: bool) -> Grads:
        """Sums in the dtypes of their parameters, or float32 at least; zeros where none came."""
        selected = self.selected
        return {name: _cast(selected[name], found.get(name), wide=wide) for name in names}


def _cast(parameter: Tensor, value: Tensor | None, *, wide: bool) -> Tensor:
    """A sum in its parameter's dtype; zeros where no gradient came."""
    dtype = parameter.dtype
    if wide and dtype is not torch.float32:
        dtype = torch.promote_types(dtype, torch.float32)
    if value is not None:
        return value if value.dtype is dtype else value.to(dtype)
    return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
