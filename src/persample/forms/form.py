"""What every form answers. Only rows are required; the rest has defaults derived from them.

A form stands for n gradients g₀ … gₙ₋₁ of one tensor of shape ``shape``. Letters: n m samples,
t s positions, a b axes of a matrix, k independent blocks, r rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .cost import Plan, scratch, spans
from .rounding import CUT, RUN, Norms, fine_dtype, units
from .sketch import Sketch


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are accumulated: float32 at least."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def real(dtype: torch.dtype) -> torch.dtype:
    """The real dtype of squares and inner products."""
    if dtype.is_complex:
        return torch.float64 if dtype == torch.complex128 else torch.float32
    return wide(dtype)


def double(dtype: torch.dtype) -> torch.dtype:
    """The same numbers in double precision."""
    return torch.complex128 if dtype.is_complex else torch.float64


def lift(seeds: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """A power of two that brings gradients into float16's range; None where nothing is narrowed.

    Gradients are unscaled in float32. What must go through a float16 operator again would vanish.
    """
    if dtype != torch.float16 or all(s.dtype == dtype or not s.numel() for s in seeds):
        return None
    peaks = [torch.where(s.isfinite(), s.abs(), 0).amax().float() for s in seeds if s.numel()]
    peak = torch.stack(peaks).amax().clamp(2.0**-100, 2.0**100)
    return torch.exp2(-torch.floor(torch.log2(peak)))


def lower(found: Tensor, up: Tensor | None) -> Tensor:
    """What came back of gradients that were multiplied by a power of two."""
    return found if up is None else found.to(wide(found.dtype)) / up


def shares_memory(rows: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Whether rows lie in the memory of one of the tensors, or are zeros without memory."""
    memory = _memory(rows)
    return memory is None or any(_memory(t) == memory for t in tensors)


def _memory(tensor: Tensor) -> int | None:
    if tensor.layout is not torch.strided or tensor._is_zerotensor():
        return None
    return tensor.untyped_storage().data_ptr()


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Re⟨x, y⟩ over all axes but the first."""
    if x.is_complex() or y.is_complex():
        x, y = torch.view_as_real(x.resolve_conj()), torch.view_as_real(y.resolve_conj())
    return flat_rows(x * y).sum(1)


def pairwise(one: Tensor, two: Tensor) -> Tensor:
    """⟨one[i], two[j]⟩ of rows, in runs: kernels add millions of terms up one after the other."""
    dtype = torch.promote_types(one.dtype, two.dtype)  # uses of another dtype
    one, two = one.to(dtype), two.to(dtype)
    if one.shape[1] <= RUN or dtype == torch.float64:
        return one @ two.T
    out = one.new_zeros(one.shape[0], two.shape[0], dtype=fine_dtype(one.device))
    for first in range(0, one.shape[1], RUN):
        out += one[:, first : first + RUN] @ two[:, first : first + RUN].T
    return out


def add_all(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of tensors."""
    return functools.reduce(torch.add, tensors)


def row_sq_norms(rows: Tensor) -> Tensor:
    """‖rows[i]‖², in short runs: as accurate as squaring first, without writing the squares."""
    flat = flat_rows(rows)
    if flat.stride(1) != 1:  # numbers that are not side by side would be added up in one lane
        flat = flat.contiguous()
    if flat.shape[1] <= RUN:
        size: Tensor = torch.linalg.vector_norm(flat, dim=1)
        return size.square_()
    whole = flat.shape[1] // CUT * CUT
    runs = flat[:, :whole].reshape(flat.shape[0], whole // CUT, CUT)
    found: Tensor = torch.linalg.vector_norm(runs, dim=2).square_().sum(1)
    if whole < flat.shape[1]:
        found += torch.linalg.vector_norm(flat[:, whole:], dim=1).square_()
    return found


Moments = tuple[Tensor, Tensor]


class Form:
    """n gradients of one tensor."""

    __slots__ = ("device", "dtype", "n", "shape")

    def __init__(self, n: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.n, self.shape, self.dtype, self.device = n, shape, dtype, device

    # ------------------------------------------------------------------ required

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Rows first … last-1 written out: (last - first, *shape).

        A form defines this or :meth:`wide_dense`, of which each is the other's default.
        """
        return self.wide_dense(first, last).to(self.dtype)

    def tensors(self) -> list[Tensor]:
        """The tensors that the form is made of and does not own."""
        return []

    def nbytes(self) -> int:
        """Bytes held by the representation."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def without(self, bad: Tensor) -> Form:
        """The same form with the gradients of some samples (a mask) replaced by zero."""
        raise NotImplementedError

    def narrowed(self, first: int, last: int) -> Form:
        """The form of rows first … last-1 alone."""
        raise NotImplementedError

    # ------------------------------------------------------------------ derived

    def converted(self, dtype: torch.dtype) -> Form:
        """The same gradients computed in a wider dtype, if they are made of factors."""
        return self

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Dense rows, computed in float32 at least."""
        dtype = wide(self.dtype)
        if dtype == self.dtype:
            return self.dense(first, last)
        part = self.narrowed(first, self.n if last is None else last)
        return part.converted(dtype).dense().to(dtype)

    def add_to(self, out: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Dense rows first … last-1 added to what is there, in the precision that is there."""
        return out.add_(self.wide_dense(first, last))

    def work(self) -> int:
        """Multiplications that writing all rows out would take."""
        return self.n * self.size

    def rows_by(self) -> str:
        """How rows are written out, where there is a choice."""
        return ""

    def owns(self, rows: Tensor) -> bool:
        """Whether dense rows are, or lie in, memory that the form is made of."""
        return shares_memory(rows, self.tensors())

    def fresh(self) -> Tensor:
        """Dense rows in memory of their own."""
        rows = self.dense().contiguous()
        return rows.clone() if self.owns(rows) else rows

    def hand_over(self) -> Tensor:
        """Dense rows in memory of their own, of a form that is not asked again."""
        return self.fresh()

    def write(self, out: Tensor) -> Tensor:
        """Dense rows into a given buffer (n, *shape)."""
        for first, last, rows in self.rows():
            out[first:last] = rows
        return out

    @property
    def size(self) -> int:
        """Elements of one gradient."""
        return self.shape.numel()

    def row_bytes(self) -> int:
        """Scratch memory that one dense row takes."""
        return self.size * wide(self.dtype).itemsize

    def plan(self) -> Plan:
        """How norms are computed, and what that costs."""
        moved = 2 * self.n * self.row_bytes()
        return Plan("rows", self.work(), moved, self.row_bytes(), self.n)

    def rows(self, budget: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """Dense rows, a few samples at a time."""
        for first, last in spans(self.n, self.row_bytes(), budget):
            yield first, last, self.wide_dense(first, last)

    def _of_rows(
        self, ask: Callable[[Tensor], Tensor], *shape: int, budget: int | None = None
    ) -> Tensor:
        """An answer for every sample from its dense row, a few samples at a time."""
        out = torch.zeros(self.n, *shape, dtype=real(self.dtype), device=self.device)
        for first, last, rows in self.rows(budget):
            out[first:last] = ask(rows)
        return out

    def norms(self) -> Norms:
        """‖gᵢ‖² for every sample, and what rounding may have done to it."""
        return self.norms_of_rows()

    def norms_of_rows(self, budget: int | None = None) -> Norms:
        """From the rows, a few samples at a time; sums are those of the same rows, or are off."""
        elements = 2 * self.size if self.dtype.is_complex else self.size
        found = self._of_rows(row_sq_norms, budget=budget)
        return Norms(found, None, self.sq_error, units(elements), rows=True)

    def exact_sq_norms(self, which: Tensor) -> Tensor:
        """‖gᵢ‖² of a few samples, from rows in double precision."""
        dtype = double(self.dtype)
        each = [self.narrowed(i, i + 1).converted(dtype) for i in which.tolist()]
        return torch.cat([row_sq_norms(one.wide_dense().to(dtype)) for one in each])

    def sq_error(self) -> Tensor | None:
        """The square of what a certain sum of one sample may be off by: None for nothing."""
        return None

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """Σᵢ cᵢ gᵢ: (*shape); ``certain``: from what the norms' bounds were computed from."""
        total = torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        for first, last, rows in self.rows():
            total += torch.tensordot(c[first:last].to(rows.dtype), rows, 1)
        return total

    def sum_of_samples(self) -> Tensor:
        """Σᵢ gᵢ."""
        return self.weighted_sum(torch.ones(self.n, dtype=torch.float64, device=self.device))

    def add_sum(self, out: Tensor, c: Tensor, *, certain: bool = False) -> Tensor:
        """The same added to what is there."""
        return out.add_(self.weighted_sum(c, certain=certain))

    def cut(self, first: int, last: int) -> Form | None:
        """The gradients of a part of the tensor, along its first axis; None if it cannot be cut."""
        return None

    def dots(self, other: Form) -> Tensor:
        """⟨gᵢ, hⱼ⟩ for every pair: (n, m)."""
        need = (self.n + (0 if other is self else other.n)) * self.row_bytes()
        if need > scratch() and self.shape[:1].numel() > 1:
            found = self._dots_of_parts(other, max(1, scratch() * self.shape[0] // need))
            if found is not None:
                return found
        out = torch.zeros(self.n, other.n, dtype=real(self.dtype), device=self.device)
        alone = other is self and need <= scratch()
        room = scratch() if alone else scratch() // 2
        for first, last, mine in self.rows(room):
            flat = flat_rows(mine)
            for start, stop, theirs in [(first, last, mine)] if alone else other.rows(room):
                out[first:last, start:stop] = pairwise(flat, flat_rows(theirs))
        return out

    def _dots_of_parts(self, other: Form, size: int) -> Tensor | None:
        """The sum over parts of the tensor, so that all rows of one fit: each is written once."""
        total = torch.zeros(self.n, other.n, dtype=fine_dtype(self.device), device=self.device)
        for first in range(0, self.shape[0], size):
            last = min(first + size, self.shape[0])
            mine = self.cut(first, last)
            theirs = mine if other is self else other.cut(first, last)
            if mine is None or theirs is None:
                return None
            total += mine.dots(theirs)
        return total.to(real(self.dtype))

    def dot(self, direction: Tensor) -> Tensor:
        """⟨gᵢ, V⟩ for every sample: (n,)."""
        return self._of_rows(lambda rows: inner(rows, direction.to(rows.dtype).unsqueeze(0)))

    def project(self, sketch: Sketch) -> Tensor:
        """The sketch of every gradient: (n, dim)."""
        return self._of_rows(sketch.of_rows, sketch.dim)

    def moments(self, dtype: torch.dtype | None = None) -> Moments:
        """Σᵢ gᵢ and Σᵢ |gᵢ|², element by element; in double precision without a ``dtype``."""
        first, second = self.no_moments(dtype)
        for _, _, rows in self.rows(scratch() // 4):
            exact = rows.to(first.dtype)
            first += exact.sum(0)
            second += exact.abs().square_().sum(0)
        return first, second

    def no_moments(self, dtype: torch.dtype | None) -> Moments:
        """Zeros for both."""
        dtype = double(self.dtype) if dtype is None else dtype
        first = torch.zeros(self.shape, dtype=dtype, device=self.device)
        return first, torch.zeros(self.shape, dtype=real(dtype), device=self.device)


def flat_rows(rows: Tensor) -> Tensor:
    """(n, elements) of real numbers; a scalar has one element."""
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj())
    return rows if rows.dim() == 2 else rows.reshape(rows.shape[0], rows.shape[1:].numel())
