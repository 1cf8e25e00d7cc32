"""Two vectors at a time: inner and cross products along an axis, distances."""

from __future__ import annotations

from torch import Tensor

from ...errors import Mixing
from ..call import Call, Result, axes, carry, trailing
from ..operators import rule
from .contraction import gather_letters, spell


@rule("linalg_vecdot cosine_similarity")
def vecdot(call: Call) -> Result:
    """Along one axis of two tensors that broadcast."""
    default = -1 if call.name == "linalg_vecdot" else 1
    pairs, _ = _pairs(call, call.arg(2, "dim", default=default))
    return carry(call, pairs, call.out)


def _pairs(call: Call, dim: int) -> tuple[list[tuple[Tensor, set[int]]], int]:
    """Two tensors that broadcast with the axis that is worked along, and this axis of both."""
    given = call.arg(0, "x", "x1", "input"), call.arg(1, "y", "x2", "other")
    rank = max(t.dim() for t in given)
    axis = next(iter(axes(dim, rank)))
    return [(t, {axis - rank + t.dim()} & set(range(t.dim()))) for t in given], axis


@rule("pairwise_distance")
def pairwise_distance(call: Call) -> Result:
    """Along the last axis."""
    a, b = call.arg(0, "x1"), call.arg(1, "x2")
    keep = bool(call.arg(4, "keepdim", default=False))
    core = trailing(call.out, 1) if keep else ()
    return carry(call, [(a, trailing(a, 1)), (b, trailing(b, 1))], call.out, core)


@rule("cdist _cdist_forward _euclidean_dist")
def cdist(call: Call) -> Result:
    """Like ``a @ b.mT``."""
    given = [call.arg(0, "x1"), call.arg(1, "x2")]
    return gather_letters(call, *spell("...ad,...bd->...ab", given, call.out))


@rule("cross linalg_cross")
def cross(call: Call) -> Result:
    """Along one axis of size three."""
    dim = call.arg(2, "dim", default=None if call.name == "cross" else -1)
    if dim is None:
        raise Mixing("torch.cross without dim picks the first axis of size 3")
    pairs, axis = _pairs(call, dim)
    return carry(call, pairs, call.out, {axis})
