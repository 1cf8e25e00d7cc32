"""Inner products of rows of tables: only rows with the same index contribute."""

from __future__ import annotations

import torch
from torch import Tensor

from .cost import MATCHED, spans
from .form import real, wide
from .segments import TableRows


def match_rows(mine: TableRows, theirs: TableRows, used: int) -> Tensor | None:
    """⟨gᵢ, hⱼ⟩ from all pairs of rows with one index; None where a table of them is cheaper.

    ``used`` indices occur in the two, which have been numbered anew from zero.
    """
    if mine.dtype.is_complex or theirs.dtype.is_complex:
        return None
    order = torch.argsort(theirs.index, stable=True)
    counts = torch.bincount(theirs.index, minlength=used)
    starts, partners = counts.cumsum(0) - counts, counts[mine.index]
    if int(partners.sum()) * MATCHED > mine.n * theirs.n * used:
        return None
    dtype = torch.promote_types(wide(mine.dtype), wide(theirs.dtype))
    out = torch.zeros(mine.n * theirs.n, dtype=real(dtype), device=mine.device)
    ends = partners.cumsum(0)
    # a pair takes three copies of a row; the numbers that identify the pair are few beside them
    item = 3 * mine.values.shape[1] * dtype.itemsize + 48
    for first, last in spans(int(ends[-1]), item):
        pair = torch.arange(first, last, device=mine.device)
        row = torch.searchsorted(ends, pair, right=True)
        place = pair - (ends - partners)[row]
        other = order[starts[mine.index[row]] + place]
        products = mine.values[row].to(dtype) * theirs.values[other].to(dtype)
        out.index_add_(0, mine.sample[row] * theirs.n + theirs.sample[other], products.sum(1))
    return out.view(mine.n, theirs.n)
