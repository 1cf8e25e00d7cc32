"""Sums of single rows: what looking up a table leaves behind."""

from __future__ import annotations

import torch
from torch import Tensor

from .cost import Plan, scratch, spans
from .form import Form, Moments, real, wide
from .kernels import zeros
from .outer import Outer
from .rounding import Norms, units
from .sketch import Sketch
from .table_kernels import (
    TableRows,
    match_rows,
    rewrite,
    rows_of_samples,
    segment_sq_norms,
    segments,
    sum_by_key,
)

_RUN = 256 << 10  # bytes of values that stay in cache while they are copied and added


class Rows(TableRows):
    """gᵢ = Σ over r with sample[r] = i of e(index[r]) ⊗ values[r], a matrix (v, d)."""

    __slots__ = ()

    def tensors(self) -> list[Tensor]:
        """What the form is made of."""
        return [self.values, self.index] + ([] if self.even else [self.sample])

    def work(self) -> int:
        """One addition per value."""
        return self.values.numel()

    def without(self, bad: Tensor) -> Rows:
        """Zero rows for some samples."""
        mask = bad[self.sample].unsqueeze(1)
        values = self.values.masked_fill(mask, 0)
        return Rows(None if self.even else self.sample, self.index, values, self.n, self.shape)

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Rows added into zeros, in float32 at least."""
        count = (self.n if last is None else last) - first
        out = zeros((count, *self.shape), wide(self.dtype), self.device)
        return self.add_to(out, first, last)

    def add_to(self, out: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Straight into their places."""
        part = self
        if first or (last is not None and last != self.n):
            part = self.narrowed(first, self.n if last is None else last)
        flat, values = out.view(part.n * self.shape[0], self.shape[1]), part.values.to(out.dtype)
        if not part.even or values.nbytes <= _RUN:
            flat.index_add_(0, part.keys(), values)
            return out
        index, starts, each = *part._index_and_starts(), part.each()
        for start, stop in spans(part.n, each * self.shape[1] * out.element_size(), _RUN):
            some = slice(start * each, stop * each)
            flat.index_add_(0, (index[start:stop] + starts[start:stop]).view(-1), values[some])
        return out

    def write(self, out: Tensor) -> Tensor:
        """Cleared, then added into; a buffer of ours is cleared only where we wrote."""
        if out.dtype != self.dtype or not out.is_contiguous() or out.is_inference():
            return super().write(out)  # inference tensors count no versions
        table, keys, values = out.view(self.n * self.shape[0], self.shape[1]), *sum_by_key(self)
        return rewrite(out, table, keys, values)

    def _copies(self) -> int:
        """Scratch memory for segment sums and widened values."""
        return 2 * self.values.numel() * wide(self.dtype).itemsize

    def plan(self) -> Plan:
        """Segment sums."""
        item = self._copies() // max(self.n, 1)
        return Plan("segments", self.values.numel(), self._copies(), item, self.n)

    def norms(self) -> Norms:
        """Segment sums, linear in the number of rows; rows of one index may cancel."""
        value, sq_error = self.segment_norms()
        return Norms(value, None, lambda: sq_error, units(self.shape[1]), rows=True)

    def sq_error(self) -> Tensor | None:
        """Some units of the sizes of rows of one index."""
        return self.segment_norms()[1]

    def segment_norms(self) -> tuple[Tensor, Tensor]:
        """‖gᵢ‖², and the square of what sums of rows of one index may be off by."""
        if self.n > 1 and self._copies() > scratch():
            runs = spans(self.n, self._copies() // self.n)
            parts = [self.narrowed(*run).segment_norms() for run in runs]
            value, error = (torch.cat(each) for each in zip(*parts, strict=True))
            return value, error
        return segment_sq_norms(self)

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """One index_add."""
        return self.add_sum(zeros(self.shape, wide(self.dtype), self.device), c)

    def add_sum(self, out: Tensor, c: Tensor, *, certain: bool = False) -> Tensor:
        """Straight into their places."""
        c, each = c.to(out.dtype), self.each() if self.even else 1
        weights = (c if self.even else c[self.sample]).view(-1, 1, 1)
        values = self.values.view(weights.shape[0], each, self.values.shape[1])
        for first, last in spans(weights.shape[0], each * values.shape[2] * out.itemsize, _RUN):
            some = values[first:last].to(out.dtype) * weights[first:last]
            index = self.index[first * each : last * each]
            out.index_add_(0, index, some.view(index.shape[0], values.shape[2]))
        return out

    def dot(self, direction: Tensor) -> Tensor:
        """Σ ⟨V[index], value⟩."""
        if self.dtype.is_complex:
            return super().dot(direction)
        dtype = wide(self.dtype)
        out = torch.zeros(self.n, dtype=dtype, device=self.device)
        matrix = direction.to(dtype)
        width = self.values.shape[1] * dtype.itemsize
        for first, last in spans(self.values.shape[0], width, _RUN):
            part = slice(first, last)
            each = (matrix[self.index[part]] * self.values[part].to(dtype)).sum(1)
            out.index_add_(0, self.sample[part], each)
        return out

    def project(self, sketch: Sketch) -> Tensor:
        """Columns of the row sketch are picked by index."""
        if self.dtype.is_complex:
            return super().project(sketch)
        dtype = wide(self.dtype)
        few = sketch.rows.to(dtype)[:, self.index].T
        small = self.values.to(dtype) @ sketch.columns.to(dtype).T
        out = small.new_zeros(self.n, sketch.dim)
        for first, last in spans(small.shape[0], sketch.dim * dtype.itemsize):
            part = slice(first, last)
            each = (few[part].unsqueeze(2) * small[part].unsqueeze(1)).flatten(1)
            out.index_add_(0, self.sample[part], each)
        return out

    def moments(self, dtype: torch.dtype | None = None) -> Moments:
        """From segment sums: linear in the number of rows, whatever the size of the table."""
        first, second = self.no_moments(dtype)
        for index, total in segments(self, first.dtype):
            first.index_add_(0, index, total)
            second.index_add_(0, index, total.abs().square_())
        return first, second

    def dots(self, other: Form) -> Tensor:
        """Row by row, or in a table of the indices that occur: others are zero on one side."""
        if not self.index.numel():
            return torch.zeros(self.n, other.n, dtype=real(self.dtype), device=self.device)
        if isinstance(other, Rows):
            used = torch.unique(torch.cat([self.index, other.index]))
            mine = self._among(used)
            theirs = mine if other is self else other._among(used)
            found = match_rows(mine, theirs, used.numel())
            return Form.dots(mine, theirs) if found is None else found
        if isinstance(other, Outer) and other.key() == (1, *self.shape):
            used = torch.unique(self.index)
            left, shape = (
                other.left.index_select(3, used),
                torch.Size((used.numel(), other.key()[2])),
            )
            return Form.dots(self._among(used), Outer(left, other.right, shape))
        return super().dots(other)

    def _among(self, used: Tensor) -> Rows:
        """The same rows in a table of these indices alone, which are sorted."""
        index = torch.searchsorted(used, self.index)
        shape = torch.Size((used.numel(), self.shape[1]))
        return Rows(None if self.even else self.sample, index, self.values, self.n, shape)

    def cross(self, outer: Outer) -> Tensor:
        """⟨gᵢ, hᵢ⟩ with an Outer form of the same table (embedding and tied output head).

        Σ over rows of sample i and positions t of left[i, t, index] ⟨right[i, t], value⟩.
        """
        dtype = wide(self.dtype)
        out = self.values.new_zeros(self.n, dtype=real(self.dtype))
        count = self.each()
        fits = 2 * self.n * outer.t * count * dtype.itemsize <= scratch()
        if fits and self.dtype == outer.dtype == dtype and self.even:
            index = self.index.view(self.n, 1, count).expand(-1, outer.t, -1)
            products = torch.bmm(
                outer.right[:, 0], self.values.view(self.n, count, self.shape[1]).mT
            )
            return products.mul_(outer.left[:, 0].gather(2, index)).sum((1, 2))
        for i, part in rows_of_samples(self.sample, self.n):
            picked = outer.left[i, 0].index_select(1, self.index[part]).to(dtype)
            products = outer.right[i, 0].to(dtype) @ self.values[part].to(dtype).T
            out[i] = (picked * products).sum()
        return out


def concatenated_rows(forms: list[Rows]) -> Rows:
    """Several look-ups in one table are more rows of one form."""
    n, shape = forms[0].n, forms[0].shape
    if n and all(f.even for f in forms):
        index = torch.cat([f.index.view(n, -1) for f in forms], 1).view(-1)
        values = torch.cat([f.values.unflatten(0, (n, f.each())) for f in forms], 1)
        return Rows(None, index, values.flatten(0, 1), n, shape)
    return Rows(
        torch.cat([f.sample for f in forms]),
        torch.cat([f.index for f in forms]),
        torch.cat([f.values for f in forms]),
        n,
        shape,
    )
