"""The gradients written out."""

from __future__ import annotations

import torch
from torch import Tensor

from .cost import Plan
from .form import Form, row_sq_norms, shares_memory, wide
from .rounding import Norms, units
from .sketch import Sketch


class Dense(Form):
    """gᵢ is row i of a tensor (n, *shape); ``made``: for this form, nobody else has its memory."""

    __slots__ = ("made", "values")

    def __init__(self, values: Tensor, *, made: bool = False) -> None:
        shape = values.shape
        self.n, self.shape, self.dtype = shape[0], shape[1:], values.dtype
        self.device, self.values, self.made = values.device, values, made

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """The rows themselves, or a view of some."""
        return self.values[first:last] if first or last is not None else self.values

    def owns(self, rows: Tensor) -> bool:
        """Dense rows are handed out as they are."""
        return shares_memory(rows, [self.values])

    def hand_over(self) -> Tensor:
        """What was made for this form goes as it is."""
        return self.values if self.made and self.values.is_contiguous() else self.fresh()

    def plan(self) -> Plan:
        """Squares of what is there."""
        return Plan("stored rows", self.n * self.size, self.nbytes(), self.row_bytes(), self.n)

    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.values.nbytes

    def without(self, bad: Tensor) -> Dense:
        """Zero rows for some samples."""
        return Dense(self.values.masked_fill(bad.view(-1, *[1] * len(self.shape)), 0))

    def cut(self, first: int, last: int) -> Dense:
        """Some of each row."""
        return Dense(self.values[:, first:last])

    def narrowed(self, first: int, last: int) -> Dense:
        """Some of the rows."""
        return Dense(self.values[first:last])

    def norms(self) -> Norms:
        """Σ over the row's elements."""
        if (
            self.dtype.is_complex
            or self.dtype != wide(self.dtype)
            or not self.values.is_contiguous()
        ):
            return super().norms()
        return Norms(row_sq_norms(self.values), units=units(self.size))

    def project(self, sketch: Sketch) -> Tensor:
        """Of all rows at once: they are there."""
        if self.dtype.is_complex or self.dtype != wide(self.dtype):
            return super().project(sketch)
        return sketch.of_rows(self.values)

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """One matrix-vector product."""
        if self.values.dtype != wide(self.dtype):
            return super().weighted_sum(c)
        flat = self.values.reshape(self.n, self.size)
        return torch.mv(flat.T, c.to(flat.dtype)).view(self.shape)
