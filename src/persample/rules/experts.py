"""Grouped matrix products: rows routed to experts, each expert a block of one parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from ..forms import JOINED, Outer, Part, Pieces
from ..layouts.reshaping import place_in_groups
from ..uses.use import Firing, Use
from .by_sample import Unsuited, only_output, row_ids
from .table import Forms, rule


@rule("_grouped_mm grouped_mm")
def grouped_mm(use: Use, firing: Firing, n: int) -> Forms:
    """X (r, i) with r sorted by expert, weight (e, i, o), offsets (e): one Outer per expert.

    All experts are blocks of one Outer where they have about equally many rows.
    """
    x, weight, offsets = use.bind(firing, "input", "mat2", "offs")
    grad, layout = only_output(use, firing)
    if x.dim() != 2 or weight.dim() != 3 or len(use.operands) != 1:
        raise Unsuited
    if use.operands[0].value is not weight or offsets is None:
        raise Unsuited
    routed = _Routed(row_ids(grad, layout, n, 1), offsets, n)
    experts, i, o = weight.shape
    longest = max(routed.longest, default=0)
    if not longest:
        raise Unsuited
    spare = experts * longest - sum(routed.longest)
    if n * spare * (i + o) <= experts * JOINED:
        left, right = (routed.side_by_side(rows, longest) for rows in (x, grad))
        return [Outer(left, right, weight.shape)]
    mine, theirs = routed.one_by_one(x), routed.one_by_one(grad)
    parts = [
        Part(Outer(mine[e], theirs[e], torch.Size((i, o))), weight.shape, (o, 1), e * i * o)
        for e in mine
    ]
    return [Pieces(parts) if len(parts) > 1 else parts[0]]


class _Routed:
    """Where the rows of every expert and sample go: sorted once for both factors."""

    def __init__(self, ids: Tensor, offsets: Tensor, n: int) -> None:
        rows = torch.arange(ids.numel(), device=ids.device)
        expert = torch.searchsorted(offsets.to(rows), rows, right=True)
        self.used = ((ids >= 0) & (expert < offsets.numel())).nonzero().flatten()  # not padding
        self.n, self.experts = n, offsets.numel()
        self.sample, self.expert = ids[self.used], expert[self.used]
        self.place, counts = place_in_groups(self.expert * n + self.sample, self.experts * n)
        self.longest: list[int] = counts.view(self.experts, n).amax(1).tolist() if n else []

    def side_by_side(self, rows: Tensor, longest: int) -> Tensor:
        """(n, e, longest, width), filled up with zeros."""
        at = (self.sample * self.experts + self.expert) * longest + self.place
        out = rows.new_zeros(self.n, self.experts, longest, rows.shape[1])
        out.view(-1, rows.shape[1]).index_copy_(0, at, rows[self.used])
        return out

    def one_by_one(self, rows: Tensor) -> dict[int, Tensor]:
        """(n, longest of the expert, width) of every expert that has rows."""
        lengths = torch.tensor(self.longest, device=rows.device)
        starts = (lengths.cumsum(0) - lengths) * self.n
        at = starts[self.expert] + self.sample * lengths[self.expert] + self.place
        out = rows.new_zeros(self.n * sum(self.longest), rows.shape[1])
        out.index_copy_(0, at, rows[self.used])
        each = out.split([self.n * length for length in self.longest])
        return {
            e: part.view(self.n, length, rows.shape[1])
            for e, (part, length) in enumerate(zip(each, self.longest, strict=True))
            if length
        }
