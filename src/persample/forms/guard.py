"""What rounding can hide in norms and sums whose terms may cancel."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def rounded(energy: Tensor, t: int) -> Tensor:
    """What a sum of t terms with this energy may be off by."""
    return (t * energy).sqrt_().mul_(8 * torch.finfo(energy.dtype).eps)


def restored(
    found: Tensor, energy: Tensor, a: int, b: int, exactly: Callable[[Tensor], Tensor]
) -> Tensor:
    """Norms from products of positions; where these cancel to some thousandths, taken again."""
    if found.dtype == torch.float64:
        return found
    slack = 400 * torch.finfo(found.dtype).eps * (math.sqrt(a) + math.sqrt(b))
    doubtful = torch.sub(found, energy, alpha=slack) < 0
    if bool(doubtful.any()):
        which = doubtful.nonzero().flatten()
        found[which] = exactly(which).to(found.dtype)
    return found


def guarded(
    found: Tensor, energy: Tensor, a: int, b: int, t: int, exactly: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Norms from products of t positions of lengths a and b, plus what rounding can have hidden.

    Doubtful norms are taken again. Also what the sum of the positions may be off by.
    """
    unit = torch.finfo(found.dtype).eps
    slack = (16 * unit * found).add_(energy, alpha=4 * unit * (math.sqrt(a) + math.sqrt(b)))
    doubtful = slack > 1e-3 * found
    sizes = slack.add_(found)
    if t == 1:
        return sizes, torch.zeros_like(sizes)
    if bool(doubtful.any()):
        which = doubtful.nonzero().flatten()
        exact = exactly(which)
        found[which] = exact.to(found.dtype)
        sizes[which] = (exact * (1 + 1e-6)).to(sizes.dtype)
    rounding = rounded(energy, t)
    return sizes.sqrt_().add_(rounding).square_(), rounding
