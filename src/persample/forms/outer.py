"""Sums over positions of outer products: what matrix products leave behind."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .cost import Plan, cheapest, scratch, spans
from .form import Form, Moments, real, row_sq_norms, wide
from .kernels import MATRIX, ONEDNN, outer_kernel
from .matrix_products import rows_by_rows, sum_products, sums_by_onednn
from .position_products import (
    apply_weights,
    energies,
    inner_products,
    matrices,
    sq_norms_from_products,
    sq_norms_from_rows,
    widen,
)
from .rounding import Norms, run_of, sq_error_of, sq_error_of_products, units
from .sketch import Sketch


class Outer(Form):
    """gᵢ[k] = Σₜ left[i, k, t] ⊗ right[i, k, t], a matrix (a, b) for each of k blocks.

    ``left`` is (n, k, t, a), ``right`` is (n, k, t, b); ``shape`` is the tensor's own shape, which
    holds the k·a·b numbers in that order. Complex factors are multiplied as they are.

    Factors of one block are kept as ``given``: (n, t, a) and (n, t, b), or (n, a) and (n, b) if
    there is one position. They get their other axes when they are needed.
    """

    __slots__ = ("given",)

    def __init__(self, left: Tensor, right: Tensor, shape: torch.Size) -> None:
        if left.dtype is not right.dtype:
            dtype = torch.promote_types(left.dtype, right.dtype)
            left, right = left.to(dtype), right.to(dtype)
        if left.dim() == 4 and left.shape[1] == 1:
            left, right = left.squeeze(1), right.squeeze(1)
        self.n, self.shape, self.dtype = left.shape[0], shape, left.dtype
        self.device, self.given = right.device, (left, right)

    @property
    def left(self) -> Tensor:
        """The left factor: (n, k, t, a)."""
        return _with_all_axes(self.given[0])

    @property
    def right(self) -> Tensor:
        """The right factor: (n, k, t, b)."""
        return _with_all_axes(self.given[1])

    # ------------------------------------------------------------------ sizes and costs

    @property
    def t(self) -> int:
        """Positions."""
        given = self.given[0]
        return given.shape[-2] if given.dim() > 2 else 1

    def key(self) -> tuple[int, int, int]:
        """Blocks and lengths: forms with the same can be put side by side."""
        left, right = self.given
        return left.shape[1:-2].numel(), left.shape[-1], right.shape[-1]

    def plan(self) -> Plan:
        """Position-by-position products, t²(a+b), against the matrix itself, t·a·b."""
        n, t, (k, a, b), width = self.n, self.t, self.key(), wide(self.dtype).itemsize
        if self.dtype.is_complex:
            return super().plan()
        if t == 1:
            return Plan("one position", n * k * (a + b), 0, 0, n)
        pairs, matrix = k * t * t, k * a * b
        return cheapest(
            Plan("gram", n * pairs * (a + b), 2 * n * pairs * width, 2 * pairs * width, n),
            Plan("direct", n * t * matrix, n * matrix * width, matrix * width, n),
        )

    def tensors(self) -> list[Tensor]:
        """What the form is made of."""
        return list(self.given)

    def work(self) -> int:
        """One product per position."""
        return self.n * self.t * self.size

    def without(self, bad: Tensor) -> Outer:
        """Zero factors for some samples."""
        left, right = self.given
        mask = bad.view(-1, *[1] * (left.dim() - 1))
        return Outer(left.masked_fill(mask, 0), right.masked_fill(mask, 0), self.shape)

    def narrowed(self, first: int, last: int) -> Outer:
        """Some samples' factors."""
        left, right = self.given
        return Outer(left[first:last], right[first:last], self.shape)

    def cut(self, first: int, last: int) -> Outer | None:
        """A part of the left factor, or some of many blocks."""
        (left, right), part = self.given, slice(first, last)
        many = left.dim() > 3
        if [*self.shape[:1]] != [left.shape[1 if many else -1]]:
            return None
        left, right = (left[:, part], right[:, part]) if many else (left[..., part], right)
        return Outer(left, right, torch.Size((last - first, *self.shape[1:])))

    def converted(self, dtype: torch.dtype) -> Outer:
        """From converted factors."""
        left, right = self.given
        return Outer(left.to(dtype), right.to(dtype), self.shape)

    # ------------------------------------------------------------------ the algebra

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """One batched matrix product."""
        left, right = self.given
        if first or last is not None:
            left, right = left[first:last], right[first:last]
        rows = matrices(left, right)
        return rows if rows.shape[1:] == self.shape else rows.reshape(rows.shape[0], *self.shape)

    def owns(self, rows: Tensor) -> bool:
        """Products are new memory, unless they are zeros without any."""
        return rows._is_zerotensor()

    def rows_by(self) -> str:
        """The kernel of one position, tried on this processor where it is large."""
        if self.t != 1:
            return ONEDNN if sums_by_onednn(*self.given) else MATRIX
        left, right = (f.unsqueeze(1) if f.dim() == 2 else f for f in self.given)
        return outer_kernel(left.mT, right)

    def write(self, out: Tensor) -> Tensor:
        """Straight into the buffer."""
        if out.dtype != self.dtype or not out.is_contiguous() or self.n == 0:
            return super().write(out)
        blocks = self.given[0].shape[1:-2]
        matrices(*self.given, out=out.view(self.n, *blocks, *self._sides()))
        return out

    def _wide(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        return widen(self.left, self.right, first, last)

    def norms(self) -> Norms:
        """By whichever of three ways is cheapest for these sizes."""
        if self.dtype.is_complex:
            return super().norms()
        a, b = self._sides()
        if self.t == 1:
            return self._norms_of_one_position(a, b)
        if self.plan().way == "gram":
            value, doubt, diagonals = sq_norms_from_products(*self.given)
            run, most = run_of(self.t, a, b), max(a, b)
            return Norms(
                value, doubt, lambda: sq_error_of_products(diagonals, doubt, run, most),
                units(a * b), exact=self.exactly,
            )  # fmt: skip
        value = sq_norms_from_rows(*self.given)
        return Norms(value, None, self.sq_error, units(a * b), rows=True, exact=self.exactly)

    def _norms_of_one_position(self, a: int, b: int) -> Norms:
        """‖l‖²‖r‖²: nothing can cancel, but a vanished square may be multiplied by a huge one."""
        left, right = (f.flatten(0, -2) for f in widen(*self.given, 0, self.n))
        one, two = row_sq_norms(left), row_sq_norms(right)
        value, tiny = one * two, torch.finfo(one.dtype).tiny
        lost = two.add_(b * tiny).mul_(a * tiny).add_(one, alpha=b * tiny)
        if value.shape[0] > self.n:
            value, lost = (each.view(self.n, -1).sum(1) for each in (value, lost))
        blocks = self.given[0].shape[1:-2].numel()
        return Norms(value, lost, units=4 * (math.sqrt(a) + math.sqrt(b)) + 16 + blocks)

    def exactly(self, which: Tensor) -> Tensor:
        """‖gᵢ‖² of a few samples from factors in double precision."""
        left, right = self.given
        return sq_norms_from_rows(left[which].double(), right[which].double())

    def sq_error(self) -> Tensor | None:
        """Some units of the sizes of all positions' terms, which may cancel."""
        if self.t == 1:
            return None
        return sq_error_of(energies(*self.given), self.t, run_of(self.t, *self._sides()))

    def _sides(self) -> tuple[int, int]:
        """Of the two factors."""
        left, right = self.given
        return left.shape[-1], right.shape[-1]

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """(c ∘ left)ᵀ right, one matrix product over all samples and positions."""
        dtype, (a, b), each = wide(self.dtype), self._sides(), self.given[0].shape[1:-1]
        one = len(each) < 2
        copied = min(a, b) if dtype == self.dtype and one else a + b
        item = each.numel() * copied * dtype.itemsize
        if self.n * item > scratch() and self.n > 1:
            sums = torch.zeros(*each[:-1], a, b, dtype=dtype, device=self.device)
            for first, last in spans(self.n, item):
                left, right = apply_weights(*self.narrowed(first, last).given, c[first:last])
                sums += sum_products(left, right)
            return sums.view(self.shape)
        left, right = apply_weights(*self.given, c)
        return sum_products(left, right).view(self.shape)

    def dot(self, direction: Tensor) -> Tensor:
        """Σₜ ⟨lₜ V, rₜ⟩."""
        if self.dtype.is_complex:
            return super().dot(direction)
        n, k, t, a = self.left.shape
        b = self.right.shape[3]
        matrix = direction.reshape(k, a, b).to(wide(self.dtype))
        out = self.right.new_zeros(n, dtype=real(self.dtype))
        for first, last in spans(n if matrix.numel() else 0, k * t * b * wide(self.dtype).itemsize):
            left, right = self._wide(first, last)
            if k == 1:  # one product for all samples
                moved = rows_by_rows(left.reshape(-1, a), matrix[0].mT).view(last - first, 1, t, b)
            else:
                moved = torch.matmul(left, matrix)
            out[first:last] = moved.mul_(right).sum((1, 2, 3))
        return out

    def dots(self, other: Form) -> Tensor:
        """By position products where cheaper than writing the matrices out."""
        if not self._pairs_by_position(other):
            return super().dots(other)
        assert isinstance(other, Outer)
        out = self.right.new_zeros(self.n, other.n, dtype=real(self.dtype))
        t, s, k = self.t, other.t, self.left.shape[1]
        item = 2 * k * t * s * wide(self.dtype).itemsize * other.n
        for first, last in spans(self.n, item):
            mine = self._wide(first, last)
            for start, stop in spans(other.n, 2 * k * t * s * 4 * (last - first)):
                out[first:last, start:stop] = inner_products(mine, other._wide(start, stop))
        return out

    def _pairs_by_position(self, other: Form) -> bool:
        if not isinstance(other, Outer) or self.dtype.is_complex or other.key() != self.key():
            return False
        n, _, t, a = self.left.shape
        m, s, b, width = other.n, other.t, self.right.shape[3], wide(self.dtype).itemsize
        if self.row_bytes() > scratch() and self.cut(0, 1) is None:
            return True
        pairs, rows = n * m * t * s, n * t + (0 if other is self else m * s)
        by_position = Plan("", pairs * (a + b), 2 * pairs * width, 0, 0)
        written = Plan("", (rows + n * m) * a * b, (n + m) * a * b * width, 0, 0)
        return by_position.cost < written.cost

    def project(self, sketch: Sketch) -> Tensor:
        """(left Sₐᵀ)ᵀ (right S_bᵀ): the matrix itself is never formed."""
        n, k, t, a = self.left.shape
        if k != 1 or self.dtype.is_complex or not sketch.fits(a, self.right.shape[3]):
            return super().project(sketch)
        out = self.right.new_zeros(n, sketch.dim, dtype=wide(self.dtype))
        item = t * (sketch.rows.shape[0] + sketch.columns.shape[0]) * 4
        for first, last in spans(n, item):
            left, right = (factor[:, 0] for factor in self._wide(first, last))
            small, other = left @ sketch.rows.to(left).T, right @ sketch.columns.to(right).T
            out[first:last] = (small.mT @ other).flatten(1)
        return out

    def moments(self, dtype: torch.dtype | None = None) -> Moments:
        """Two products where there is one position, else written out a few rows at a time."""
        if self.t != 1 or self.left.shape[1] != 1 or self.dtype.is_complex:
            return super().moments(dtype)
        left, right = (
            factor[:, 0, 0].to(dtype or torch.float64) for factor in (self.left, self.right)
        )
        squares = torch.mm(left.square().T, right.square())
        return torch.mm(left.T, right).view(self.shape), squares.view(self.shape)


def _with_all_axes(factor: Tensor) -> Tensor:
    """Blocks and positions as axes of one, where there is one of them."""
    return factor[(slice(None), *[None] * (4 - factor.dim()))]
