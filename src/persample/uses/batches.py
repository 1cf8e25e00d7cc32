"""Which batch a tensor belongs to: one recording holds one batch, unless a backward joins several.

Every tensor with samples carries a bit for each batch that it was computed from, and one more bit
once it was computed with parameters. Batches are told apart where data enter: a call of the model
with fresh samples opens a new batch, unless one of its other arguments was computed in the block
with parameters (the state of a recurrent network): then it goes on with that batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError

_APART = "one record block for each micro-batch, with tape.set_grad(..., accumulate=True)"
COMPUTED = 1  # the first bit: a parameter had a part in it


class Batches:
    """The batches of a recording, and which of them are known to hold the same samples."""

    def __init__(self, *, same: bool) -> None:
        self._same = same  # the user's word: all batches hold the same samples
        self._next = COMPUTED << 1
        self._joined = 0
        self._touched = 0
        self.sizes: list[int] = []  # of calls whose inputs hold another number of samples

    def enter(self, known: Sequence[int]) -> int:
        """The bits of fresh samples, given those of the other arguments of the call."""
        found = 0
        for batches in known:
            if batches & COMPUTED:
                found |= batches & ~COMPUTED
        if not found:
            found, self._next = self._next, self._next << 1
        return found

    # ------------------------------------------------------------------ backward passes

    def begin(self) -> None:
        """A backward pass begins."""
        self._touched = 0

    def touch(self, batches: int) -> None:
        """It reached a use of data of these batches."""
        self._touched |= batches

    @property
    def reached(self) -> bool:
        """Whether the last pass reached any use."""
        return bool(self._touched)

    def expect_joined(self, *, first: bool, batches: int | None = None) -> None:
        """Refuse a later backward pass from a batch that no earlier pass came from.

        One pass over several batches joins them: whoever adds their losses says that sample i is
        one sample. ``batches``: those of the losses, where no use was reached.
        """
        reached = (self._touched if batches is None else batches) & ~COMPUTED
        several = self._next > COMPUTED << 2
        if not first and several and not self._same and not reached & self._joined:
            raise UsageError(
                "a second batch in one recording",
                why="this backward pass comes from other inputs than the one before, and sample i "
                "of both would be added up as if it were one sample; the answers of the first "
                "batch are kept",
                fix=f"{_APART}; or, if sample i is the same in both, tape.backward(a + b) or "
                "record(..., same_samples=True)",
            )
        self._joined |= reached

    def expect_one_size(self, n: int | None) -> None:
        """Refuse losses of a call whose inputs hold another number of samples."""
        other = next((size for size in self.sizes if size != n), None)
        if n is not None and other is not None:
            raise UsageError(
                f"a second batch in one recording: {n} samples, then {other}",
                why=f"the first call of the model was given {n} samples, a later one {other}: they "
                "cannot be the same samples",
                fix=f"{_APART}; or, if all samples share those inputs, add its losses to theirs",
            )
