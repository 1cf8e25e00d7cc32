"""One Poisson batch: its micro-batches, each of which must be recorded exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import UsageError
from .loading import placed
from .sums import Sums
from .users import Part

_LOOP = "for batch in parts: with training.record() as tape: tape.backward(losses)"


class Batch:
    """An iterable of micro-batches; there may be none.

    Attributes:
        step: The number of the step, from 0.
        parts: This process's micro-batches.
        sums: What was added up so far.
        parameters: The trainable parameters when it was drawn.
        finished: Whether its step was taken.
    """

    def __init__(
        self,
        step: int,
        parts: Sequence[Part],
        loaded: Iterator[Any],
        parameters: Mapping[str, Tensor],
    ) -> None:
        self.step, self.parts, self.sums = step, list(parts), Sums(parameters)
        self.parameters, self.finished = dict(parameters), False
        self._loaded = loaded
        self._device = next(iter(parameters.values())).device
        self._taken = 0  # micro-batches handed out
        self._recorded = 0
        self._content: Any = None  # of the micro-batch that was handed out last

    def __len__(self) -> int:
        """How many micro-batches this process has: a secret, as the draw is."""
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        if self._taken:
            raise UsageError(
                "the micro-batches of a batch are read a second time",
                why="each of them must be added to the sum once",
                fix=_LOOP,
            )
        for _ in self.parts:
            if self._recorded < self._taken:
                raise self._unrecorded()
            self._content = placed(next(self._loaded), self._device)
            self._taken += 1
            yield self._content

    def current(self) -> Part:
        """The micro-batch that was handed out last and is not recorded yet."""
        if self._recorded == self._taken:
            what = "no micro-batch was read" if not self._taken else "it was recorded already"
            raise UsageError(
                f"there is no micro-batch to record: {what}",
                why="each of them must be added to the sum once",
                fix=_LOOP,
            )
        return self.parts[self._taken - 1]

    def tensors(self, options: Mapping[str, Any]) -> Iterator[tuple[Tensor, int]]:
        """The current micro-batch's tensors that hold its rows, and on which axis.

        Labels and masks too, which the model may never receive: a number that a loss takes from
        all of them (how many are not padding, say) couples the samples, and is refused.
        """
        rows, dim = len(self.current().rows), options.get("dim", 0)
        skipped = options.get("constants", ())
        skipped = [skipped] if isinstance(skipped, (str, int, Tensor)) else list(skipped)
        names = [c for c in skipped if not isinstance(c, Tensor)]
        tensors = {id(c) for c in skipped if isinstance(c, Tensor)}
        for name, tensor in _leaves(None, self._content):
            if name in names or id(tensor) in tensors:
                continue
            for axis in (dim, 0):
                if tensor.dim() > axis and tensor.shape[axis] == rows:
                    yield tensor, axis
                    break

    def add(self, found: Mapping[str, Tensor]) -> None:
        """Add the clipped sums of the current micro-batch."""
        if not self.current().idle:
            self.sums.add(found)
        self._recorded += 1
        self._content = None

    def expect_complete(self) -> None:
        """Refuse a batch of which a part is missing."""
        if self._recorded < self._taken:
            raise self._unrecorded()
        if self._taken < len(self.parts):
            raise UsageError(
                "the batch has micro-batches that were not read",
                why="a sum over a part of the batch is not the sum that the plan accounts for",
                fix=f"{_LOOP}; then training.step()",
            )

    def _unrecorded(self) -> UsageError:
        return UsageError(
            "a micro-batch was read and not recorded",
            why="a sum over a part of the batch is not the sum that the plan accounts for",
            fix=_LOOP,
        )


def _leaves(name: Any, value: Any) -> Iterator[tuple[Any, Tensor]]:
    """Tensors in tuples, lists and dictionaries, with their innermost key or position."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):  # also the batches of Hugging Face
        for key, item in value.items():
            yield from _leaves(key, item)
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            yield from _leaves(position, item)
