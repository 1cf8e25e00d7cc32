"""Rows of a table that constants picked, and that were transformed before samples were used.

Negatives shared by a batch, or positions that pass a layer: the gradient of the picked rows is a
form of their own size, and the table's is nothing but its rows in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor

from ..cost import Plan, spans
from ..dense import Dense
from ..form import Form, Moments, add_all, wide
from ..mapped import Mapped, Masked
from ..rounding import Norms, add_errors, units
from ..sketch import Sketch
from ..table_rows import Rows


class Picked(Mapped):
    """gᵢ[v] = Σ over r with index[r] = v of hᵢ[r]; ``form`` holds all hᵢ, the table is (v, d).

    ``index`` is (r,), the same for every sample; rows of the ``padding`` index count nothing.
    ``key`` identifies the look-up.
    """

    __slots__ = ("distinct", "index", "key", "padding")

    def __init__(
        self, form: Form, shape: torch.Size, index: Tensor, padding: int, key: Hashable
    ) -> None:
        super().__init__(form, shape, form.dtype, form.device)
        self.index, self.padding, self.key = index, padding, key
        used = torch.unique(index)
        self.distinct = used.numel() == index.numel() and not bool((index == padding).any())

    def of(self, form: Form) -> Picked:
        """The same look-up of another form."""
        return Picked(form, self.shape, self.index, self.padding, self.key)

    def map(self) -> Hashable:
        """The look-up."""
        return Picked, self.key

    def without(self, bad: Tensor) -> Picked:
        """Zero gradients for some samples."""
        return self.of(self.form.without(bad) if self.distinct else Masked(self.form, bad))

    def row_bytes(self) -> int:
        """A row of the table and the picked rows that are added to it."""
        return super().row_bytes() + 2 * self.form.row_bytes()

    def plan(self) -> Plan:
        """The picked rows' own where each is picked once, else segment sums."""
        if self.distinct:
            return self.form.plan()
        item = 4 * self.form.row_bytes()
        return Plan("segments", self.form.work(), self.n * item, item, self.n)

    # ------------------------------------------------------------------ as rows of the table

    def table(self, first: int = 0, last: int | None = None) -> Rows:
        """Some samples' picked rows, written out."""
        rows = self.form.wide_dense(first, last)
        values = rows.reshape(rows.shape[0], self.index.numel(), self.shape[1])
        index = self.index
        if self.padding >= 0:
            kept = (index != self.padding).nonzero().flatten()
            values, index = values[:, kept], index[kept]
        return Rows(
            None, index.repeat(rows.shape[0]), values.flatten(0, 1), rows.shape[0], self.shape
        )

    def _tables(self) -> Iterator[tuple[int, int, Rows]]:
        for first, last in spans(self.n, 4 * self.form.row_bytes()):
            yield first, last, self.table(first, last)

    def _each(self, ask: Callable[[Rows], Tensor]) -> Tensor:
        """An answer for every sample, a few at a time; zero rows give the shape for no samples."""
        found = [ask(rows) for _, _, rows in self._tables()]
        return torch.cat(found) if found else ask(self.table(0, 0))

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Picked rows added into zeros."""
        return self.table(first, last).dense()

    def add_to(self, out: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Straight into their places."""
        return self.table(first, last).add_to(out)

    def gather(self) -> Picked:
        """The same with every index once: rows of one index are added up for all samples at once.

        Tables of relative positions are picked from thousands of times and have few rows.
        """
        kept = (self.index != self.padding).nonzero().flatten()
        used, where = torch.unique(self.index[kept], return_inverse=True)
        count, d = used.numel(), self.shape[1]
        dtype = wide(self.dtype)
        out = torch.empty(self.n, count, d, dtype=dtype, device=self.device)
        for first, last in spans(self.n, 3 * self.form.row_bytes()):
            rows = self.form.wide_dense(first, last).movedim(0, -2)  # samples beside one another
            rows = rows.reshape(self.index.numel(), (last - first) * d)
            rows = rows if kept.numel() == rows.shape[0] else rows[kept]
            sums = rows.new_zeros(count, rows.shape[1]).index_add_(0, where, rows)
            out[first:last] = sums.view(count, last - first, d).transpose(0, 1)
        return Picked(Dense(out), self.shape, used, -1, (self.key, "gathered"))

    # ------------------------------------------------------------------ norms

    def norms(self) -> Norms:
        """Those of the picked rows where each is picked once, else of the table's."""
        if self.distinct:
            return self.form.norms()
        value, error = self._each(lambda rows: torch.stack(rows.segment_norms(), 1)).unbind(1)
        return Norms(
            value,
            None,
            lambda: add_errors([error, self._more()]),
            units(self.shape[1]),
            rows=True,
        )

    def _more(self) -> Tensor | None:
        """What rounding of picked rows may come to where several are added up."""
        most = torch.bincount(self.index).max() if self.index.numel() else 0
        sq_error = self.form.sq_error()
        return None if sq_error is None else sq_error * most

    def sq_error(self) -> Tensor | None:
        """That of the picked rows, or of their segment sums."""
        return self.form.sq_error() if self.distinct else self.norms().sq_error()

    # ------------------------------------------------------------------ sums and products

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """The picked rows' own sum, added to the table; or rows, if norms come from them."""
        if certain and not self.distinct:
            out = torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
            for first, last, rows in self._tables():
                rows.add_sum(out, c[first:last])
            return out
        picked = self.form.weighted_sum(c, certain=certain)
        values = picked.reshape(self.index.numel(), self.shape[1])
        if self.padding >= 0:
            values = values.masked_fill((self.index == self.padding).unsqueeze(1), 0)
        return values.new_zeros(self.shape).index_add_(0, self.index, values)

    def dot(self, direction: Tensor) -> Tensor:
        """With the direction's own picked rows."""
        rows = direction.index_select(0, self.index)
        if self.padding >= 0:
            rows = rows.masked_fill((self.index == self.padding).unsqueeze(1), 0)
        return self.form.dot(rows.view(self.form.shape))

    def project(self, sketch: Sketch) -> Tensor:
        """Of the picked rows."""
        return self._each(lambda rows: rows.project(sketch))

    def dots(self, other: Form) -> Tensor:
        """In a table of the indices that occur."""
        mine = self.table()
        if isinstance(other, Picked):
            return mine.dots(mine if other is self else other.table())
        return mine.dots(other)

    def moments(self, dtype: torch.dtype | None = None) -> Moments:
        """Those of the picked rows, added."""
        each = [rows.moments(dtype) for _, _, rows in self._tables()] or [self.no_moments(dtype)]
        return add_all([one for one, _ in each]), add_all([two for _, two in each])
