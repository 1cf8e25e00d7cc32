"""Whether a backward pass does the same when it runs again: code of the user's own may not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import VerificationError
from ..forms import Form
from ..run_state import sums, tolerance


def footprint(tensors: Sequence[Tensor]) -> Tensor:
    """Two numbers for each tensor: a sum that distinguishes rows, and how large it could be."""
    sizes = [t.detach().abs().sum(dtype=torch.float64) for t in tensors]
    return torch.stack([sums(tensors), 3 * sums(sizes)])


def alike(one: Sequence[Tensor], other: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether two backward passes left the same footprints, up to rounding."""
    if [t.shape for t in one] != [t.shape for t in other]:
        return False
    if not one:
        return True
    (a, size), (b, _) = torch.cat(list(one), 1), torch.cat(list(other), 1)
    near = (a - b).abs() <= tolerance(dtype) * size
    return bool((near | (a.isnan() & b.isnan()) | (a == b)).all())


class PassComparison:
    """Whether a lean recording's later passes bring the output gradients of the first.

    Only looked at where code of the user's own, or a recomputation, runs in them (``guarded``).
    """

    def __init__(self) -> None:
        self.guarded = False
        self._random = False  # random numbers were drawn in the first pass
        self._narrow = torch.float64
        self._passed: list[Tensor] = []
        self._first: list[Tensor] | None = None

    def begin(self) -> None:
        """A pass begins."""
        self._passed = []

    def note(self, grads: Iterable[Tensor | None]) -> None:
        """Output gradients passed."""
        found = [grad for grad in grads if grad is not None]
        if self.guarded and found:
            self._passed.append(footprint(found))
            dtypes = {self._narrow, *(grad.dtype for grad in found)}
            self._narrow = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def finish(self, *, random: bool | None = None) -> None:
        """A pass is over; refuse it if it was another one than the first."""
        if self._first is None:
            self._first, self._random = self._passed, bool(random)
        elif self._random or not alike(self._first, self._passed, self._narrow):
            raise VerificationError(
                "this backward pass was another one than the first",
                why="a hook, a custom function or a recomputation draws random numbers in it, or "
                "keeps a state: norms of one pass say nothing of another's gradients",
                fix="record without lean, or name the question in persample.Ahead(...)",
            )


def expect_deterministic(name: str, form: Form) -> None:
    """Refuse code on the way to a parameter that does something else the second time."""
    if form.n:
        once, again = form.dense(0, 1), form.dense(0, 1)
        room = tolerance(form.dtype) * (once.abs() + again.abs()).nan_to_num(0.0, 0.0, 0.0).sum()
        if bool(((once - again).abs() > room).any()):
            raise not_deterministic(name)


def not_deterministic(name: str) -> VerificationError:
    """A gradient is another one the second time."""
    return VerificationError(
        f"the first sample's gradient of {name!r} is another one the second time",
        why="a custom function or a hook keeps a state between backward passes, or draws random "
        "numbers in them",
        fix="keep what backward needs in ctx as forward left it",
    )
