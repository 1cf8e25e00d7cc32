"""What rounding can hide in norms and sums whose terms may cancel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_DOUBT = 400 * torch.finfo(torch.float32).eps


def rounded(energy: Tensor, t: int) -> Tensor:
    """What a sum of t terms with this energy may be off by."""
    return (t * energy).sqrt_().mul_(8 * torch.finfo(energy.dtype).eps)


def scaled(energy: Tensor, a: int, b: int) -> Tensor:
    """The energy in units of what rounding of products of these lengths can hide of it."""
    return energy * (math.sqrt(a) + math.sqrt(b))


def doubts(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Which squared norms, each with its scale, have samples that cancel to some thousandths.

    All of them are read back at once.
    """
    first = pairs[0][0]
    found = torch.stack([f.to(first) for f, _ in pairs])
    scale = torch.stack([s.to(first) for _, s in pairs])
    flags: list[bool] = (torch.sub(found, scale, alpha=_DOUBT) < 0).any(1).tolist()
    return flags


def restored(found: Tensor, scale: Tensor, exactly: Callable[[Tensor], Tensor]) -> Tensor:
    """Squared norms; where products of positions cancel to some thousandths, taken again."""
    which = (torch.sub(found, scale, alpha=_DOUBT) < 0).nonzero().flatten()
    if which.numel():
        found[which] = exactly(which).to(found)
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
