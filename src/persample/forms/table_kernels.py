"""Kernels of rows of tables: rows of one index added up, multiplied, written to a buffer again."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Self

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .cost import MATCHED, PICKED, spans
from .form import Form, real, row_sq_norms, wide
from .rounding import fine_dtype

# The rows that were written to a user's buffer, and the buffer's version and memory then.
_WRITTEN: MutableMapping[Tensor, tuple[Tensor, int, int]] = WeakTensorKeyDictionary()
_LOOKS = 2048  # elements of a reused buffer that are looked at


class TableRows(Form):
    """Rows of a table (v, d), each with its sample, its index and its values.

    ``sample`` and ``index`` are (r,), ``values`` is (r, d). Without ``sample``, all samples have
    equally many rows, one sample's after the other's.
    """

    __slots__ = ("_sample", "even", "index", "values")

    def __init__(
        self, sample: Tensor | None, index: Tensor, values: Tensor, n: int, shape: torch.Size
    ) -> None:
        super().__init__(n, shape, values.dtype, values.device)
        self._sample, self.even = sample, sample is None
        self.index, self.values = index, values

    @property
    def sample(self) -> Tensor:
        """The sample of every row."""
        if self._sample is None:
            samples = torch.arange(self.n, device=self.device)
            self._sample = samples.repeat_interleave(self.each())
        return self._sample

    def each(self) -> int:
        """How many rows a sample has, if all have equally many."""
        return self.index.numel() // max(self.n, 1)

    def narrowed(self, first: int, last: int) -> Self:
        """Some samples' rows."""
        kind, count = type(self), last - first
        if self.even:
            part = slice(first * self.each(), last * self.each())
            return kind(None, self.index[part], self.values[part], count, self.shape)
        keep = (self.sample >= first) & (self.sample < last)
        mine = self.sample[keep] - first
        return kind(mine, self.index[keep], self.values[keep], count, self.shape)

    def keys(self) -> Tensor:
        """One number for every (sample, index)."""
        if not self.even:
            return torch.add(self.index, self.sample, alpha=self.shape[0])
        index, starts = self._index_and_starts()
        return (index + starts).view(-1)

    def _index_and_starts(self) -> tuple[Tensor, Tensor]:
        """The index of each sample's rows, (n, r / n), and where its table begins, (n, 1)."""
        v = self.shape[0]
        starts = torch.arange(0, self.n * v, max(v, 1), device=self.device).unsqueeze(1)
        return self.index.view(self.n, self.each()), starts


def sum_by_key(rows: TableRows) -> tuple[Tensor, Tensor]:
    """Keys and values; those of one key are added up before they are rounded."""
    if rows.dtype == wide(rows.dtype):
        return rows.keys(), rows.values
    keys, where = torch.unique(rows.keys(), return_inverse=True)
    values = rows.values.to(wide(rows.dtype))
    total = values.new_zeros(keys.numel(), values.shape[1]).index_add_(0, where, values)
    return keys, total.to(rows.dtype)


def segment_sq_norms(rows: TableRows) -> tuple[Tensor, Tensor]:
    """‖Σ‖² of rows with equal (sample, index), and the square of what it may be off by.

    Both are added up for every sample. One large row swallows all small ones after it.
    """
    v, values = rows.shape[0], rows.values.to(wide(rows.dtype))
    if rows.even and rows.each() == 1:  # nothing to add: an id for each sample
        found = row_sq_norms(values)
        return found, torch.zeros_like(found)
    keys, where, counts = torch.unique(rows.keys(), return_inverse=True, return_counts=True)
    norms = row_sq_norms(values).sqrt_()
    alone: Tensor | float = 0.0
    if is_worth_picking(rows, rows.index.numel() - keys.numel()):  # only these have to be added
        several = counts > 1
        again = several[where]
        alone = _per_sample(rows, norms.square().masked_fill_(again, 0))
        which = again.nonzero().flatten()
        values, norms, keys = values[which], norms[which], keys[several]
        counts = counts[several]
        where = (several.cumsum(0) - 1)[where[which]]
    total = values.new_zeros(keys.numel(), values.shape[1]).index_add_(0, where, values)
    norms = norms.new_zeros(keys.numel()).index_add_(0, where, norms)
    norms.mul_((16 + counts / 2) * torch.finfo(norms.dtype).eps)
    both = torch.stack([row_sq_norms(total), norms.square_()], 1)
    dtype = fine_dtype(rows.device)
    each = both.new_zeros(rows.n, 2, dtype=dtype).index_add_(0, keys // v, both.to(dtype))
    each[:, 0] += alone
    each = each.to(both.dtype)
    return each[:, 0], each[:, 1]


def _per_sample(rows: TableRows, each: Tensor) -> Tensor:
    """One number for every row, added up for every sample."""
    dtype = fine_dtype(rows.device)
    if rows.even:
        return each.view(rows.n, rows.each()).sum(1, dtype=dtype)
    return each.new_zeros(rows.n, dtype=dtype).index_add_(0, rows.sample, each.to(dtype))


def rows_of_samples(sample: Tensor, n: int) -> Iterator[tuple[int, Tensor]]:
    """Which rows are a sample's, for every sample that has some."""
    counts = torch.bincount(sample, minlength=n).tolist()
    for i, rows in enumerate(torch.argsort(sample, stable=True).split(counts)):
        if counts[i]:
            yield i, rows


def is_worth_picking(rows: TableRows, again: int) -> bool:
    """Whether indices that occur again are worth being picked out."""
    return 16 * again < rows.index.numel() and rows.values.numel() > PICKED


def segments(rows: TableRows, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Sums of rows with equal (sample, index) and their indices, a few samples at a time."""
    each = 3 * rows.values.numel() * dtype.itemsize // max(rows.n, 1)
    for first, last in spans(rows.n, each):
        part = rows if last - first == rows.n else rows.narrowed(first, last)
        keys, where = torch.unique(part.keys(), return_inverse=True)
        total = torch.zeros(keys.numel(), rows.shape[1], dtype=dtype, device=rows.device)
        yield keys % rows.shape[0], total.index_add_(0, where, part.values.to(dtype))


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


def rewrite(out: Tensor, table: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """``values`` added up in the rows ``keys`` of ``table``, a view of all of ``out``."""
    before = None if _collectives() else _WRITTEN.get(out)
    ours = before is not None and before[1:] == (out._version, out.data_ptr())
    if before is not None and ours:
        table.index_fill_(0, before[0], 0)
    if not ours or _holds_numbers(table):
        table.zero_()
    table.index_add_(0, keys, values)
    _WRITTEN[out] = (keys, out._version, out.data_ptr())
    return out


def _collectives() -> bool:
    """Whether other processes may write to buffers, which no version shows."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _holds_numbers(table: Tensor) -> bool:
    """Whether a cleared table is not zero: NumPy, ``.data`` or DLPack wrote all over it."""
    flat = table.view(-1)
    return bool(flat[:: max(1, flat.numel() // _LOOKS)].any())
