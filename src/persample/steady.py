"""Whether a backward pass does the same when it runs again: code of the user's own may not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .conditions import sums, tolerance
from .errors import VerificationError
from .forms import Form


def footprint(tensors: Sequence[Tensor]) -> Tensor:
    """Two numbers for each tensor: a sum that tells rows apart, and how large it could be."""
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


def expect_steady(name: str, form: Form) -> None:
    """Refuse code on the way to a parameter that does something else the second time."""
    if form.n:
        once, again = form.dense(0, 1), form.dense(0, 1)
        room = tolerance(form.dtype) * (once.abs() + again.abs()).nan_to_num(0.0, 0.0, 0.0).sum()
        if bool(((once - again).abs() > room).any()):
            raise unsteady(name)


def unsteady(name: str) -> VerificationError:
    """A gradient is another one the second time."""
    return VerificationError(
        f"the first sample's gradient of {name!r} is another one the second time",
        why="a custom function or a hook keeps a state between backward passes, or draws random "
        "numbers in them",
        fix="keep what backward needs in ctx as forward left it",
    )
