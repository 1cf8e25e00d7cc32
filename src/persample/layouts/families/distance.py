"""Two vectors at a time: inner and cross products, similarities and distances along an axis."""

from __future__ import annotations

from ...errors import Mixing
from ..call import Call, Result, axes, carry
from ..operators import rule

# the axis that two tensors are worked along, by default, and where it is among the arguments
_ALONG: dict[str, tuple[int | None, int]] = {
    "linalg_vecdot": (-1, 2), "cosine_similarity": (1, 2), "cross": (None, 2),
    "linalg_cross": (-1, 2), "pairwise_distance": (-1, 5),
}  # fmt: skip


@rule(" ".join(_ALONG))
def of_pairs(call: Call) -> Result:
    """Along one axis of two tensors that broadcast, which is kept or gone."""
    default, place = _ALONG[call.name]
    dim = call.arg(place, "dim", default=default)
    if dim is None:
        raise Mixing("torch.cross without dim picks the first axis of size 3")
    given = call.arg(0, "x", "x1", "input"), call.arg(1, "y", "x2", "other")
    rank = max(t.dim() for t in given)
    axis = next(iter(axes(dim, rank)))
    pairs = [(t, {axis - rank + t.dim()} & set(range(t.dim()))) for t in given]
    return carry(call, pairs, call.out, {axis} if call.out.dim() == rank else ())
