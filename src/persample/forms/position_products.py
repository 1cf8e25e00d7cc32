"""Kernels of sums of outer products. Factors are (n, k, t, a) and (n, k, t, b), or without k.

Several parameters may need products of the same positions: q, k and v of the same data. While norms
of many parameters are computed, the products of a factor that several of them share are kept until
its last use.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from .cost import scratch, spans
from .form import real, row_sq_norms, wide
from .kernels import outer_products
from .matrix_products import rows_by_rows, sum_products
from .rounding import (
    Products,
    fine_dtype,
    hidden_in_products,
    join_samples,
    multiply_products,
    norms_of_last_axis,
    per_sample,
)

Key = tuple[Any, ...]


class Shared:
    """How often each factor is still needed, and the products that are kept for it."""

    def __init__(self, factors: Iterable[Tensor]) -> None:
        self.left = Counter(f.data_ptr() for f in factors)
        self.kept: dict[Key, Tensor] = {}

    def products(self, factor: Tensor, part: Tensor, first: int, last: int) -> Tensor:
        """``part @ part.mT`` of some samples of a factor, not to be written to."""
        at, n = factor.data_ptr(), factor.shape[0]
        if self.left[at] < 2 and not self.kept:
            return rows_by_rows(part, part)
        key = at, factor.shape, factor.stride(), factor.dtype, first, last
        found = self.kept.get(key)
        if found is None:
            found = rows_by_rows(part, part)
            if self.left[at] > 1 and found.nbytes * n // (last - first) <= scratch():
                self.kept[key] = found
        if last == n:
            self.left[at] -= 1
        if self.left[at] <= 0:
            self.kept = {k: v for k, v in self.kept.items() if k[0] != at}
        return found


_CURRENT: ContextVar[Shared] = ContextVar("shared products")


@contextlib.contextmanager
def share_products(factors: Iterable[Tensor]) -> Iterator[None]:
    """Keep products that these factors (each named once per use) have in common."""
    token = _CURRENT.set(Shared(factors))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def widen(left: Tensor, right: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Some samples' factors, in float32 at least."""
    if last - first != left.shape[0]:
        left, right = left[first:last], right[first:last]
    dtype = wide(left.dtype)
    return (left, right) if dtype is left.dtype else (left.to(dtype), right.to(dtype))


def matrices(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Σₜ lₜ ⊗ rₜ, one matrix for every sample and block."""
    if left.dim() == 2:
        return outer_products(left.unsqueeze(2), right.unsqueeze(1), out)
    if left.shape[-2] == 1:
        return outer_products(left.mT, right, out)
    return sum_products(left, right, out)


def apply_weights(left: Tensor, right: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors, the narrower one times c: (n·t, a) and (n·t, b), for each block if many."""
    dtype, a, b = wide(left.dtype), left.shape[-1], right.shape[-1]
    left, right = left.to(dtype), right.to(dtype)
    scale = c.to(dtype).view(-1, *[1] * (left.dim() - 1))
    if a <= b:
        left = left * scale
    else:
        right = right * scale
    if left.dim() == 2:
        return left, right
    if left.dim() == 4:
        return left.transpose(0, 1).flatten(1, 2), right.transpose(0, 1).flatten(1, 2)
    larger = left if a > b else right
    if larger.stride(0) < larger.stride(1):  # a time loop's: positions before samples
        left, right = left.transpose(0, 1), right.transpose(0, 1)
    return left.flatten(0, 1), right.flatten(0, 1)


def sq_norms_from_products(left: Tensor, right: Tensor) -> Products:
    """Σₜₛ ⟨lₜ, lₛ⟩⟨rₜ, rₛ⟩, and what :func:`multiply_products` says of it."""
    n, t = left.shape[0], left.shape[-2]
    item = 2 * left.shape[1:-1].numel() * t * wide(left.dtype).itemsize
    if item > scratch():
        return _by_blocks(left, right)
    found, sides, shared = [], (left.shape[-1], right.shape[-1]), _CURRENT.get(Shared(()))
    for first, last in spans(n, item, 4 << 20):  # in cache
        some, other = widen(left, right, first, last)
        one = shared.products(left, some, first, last)
        two = shared.products(right, other, first, last)
        found.append(multiply_products(one, two, *sides))
    return join_samples(found) if found else _by_blocks(left, right)


def _by_blocks(left: Tensor, right: Tensor) -> Products:
    """Sample by sample where t × t does not fit: blocks on and above the diagonal."""
    if left.dim() == 3:
        left, right = left.unsqueeze(1), right.unsqueeze(1)
    n, k, t, a = left.shape
    b, dtype = right.shape[-1], real(right.dtype)
    found = right.new_zeros(n, dtype=fine_dtype(right.device))
    diagonals, sizes = right.new_zeros(2, n, k, t, dtype=dtype), found.new_zeros(2, n, k)
    side = max(1, math.isqrt(scratch() // (2 * k * wide(left.dtype).itemsize)))
    for i in range(n):
        factors = [f[0] for f in widen(left, right, i, i + 1)]
        for row, column in itertools.product(range(0, t, side), repeat=2):
            if row > column:
                continue
            mine, other = slice(row, row + side), slice(column, column + side)
            both = [rows_by_rows(f[:, mine], f[:, other]) for f in factors]
            times = 2
            if row == column:
                diagonals[:, i, :, mine] = torch.stack(both).diagonal(dim1=-2, dim2=-1)
                times = 1
            sizes[:, i] += times * torch.stack([m.square().sum((1, 2)) for m in both])
            found[i] += both[0].mul_(both[1]).sum() * times
    doubt = hidden_in_products(diagonals.sum(-1), sizes.sqrt_().to(dtype), a, b, t)
    return found.clamp_(min=0).to(dtype), doubt, diagonals


def inner_products(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> Tensor:
    """⟨gᵢ, hⱼ⟩ of every pair of samples, factors (n, k, t, ·) and (m, k, s, ·): (n, m)."""
    (n, k, t, _), (m, _, s, _) = one[0].shape, two[0].shape
    if k == 1:  # one product of all positions with all positions
        pairs = zip(one, two, strict=True)
        left, right = (rows_by_rows(f.flatten(0, 2), g.flatten(0, 2)) for f, g in pairs)
        return left.mul_(right).view(n, t, m, s).sum((1, 3))
    products = torch.einsum("nkta,mksa->nmkts", one[0], two[0])
    products *= torch.einsum("nktb,mksb->nmkts", one[1], two[1])
    return products.sum((2, 3, 4))


def sq_norms_from_rows(left: Tensor, right: Tensor) -> Tensor:
    """‖Σₜ lₜ ⊗ rₜ‖², a few samples at a time, so that the matrices stay in cache."""
    n, a = left.shape[0], left.shape[-1]
    found = right.new_zeros(n, dtype=fine_dtype(right.device))
    line = left.shape[1:-2].numel() * right.shape[-1] * wide(right.dtype).itemsize
    for first, last in spans(n, a * line, 4 << 20):
        some, other = widen(left, right, first, last)
        for start, stop in spans(a, line * (last - first)):
            matrix = sum_products(some[..., start:stop], other)
            found[first:last] += row_sq_norms(matrix)
    return found.to(real(right.dtype))


def energies(left: Tensor, right: Tensor) -> Tensor:
    """Σₜ ‖lₜ‖²‖rₜ‖², the scale of what rounding can hide."""
    one, two = (norms_of_last_axis(f) for f in widen(left, right, 0, left.shape[0]))
    return per_sample((one * two).square_())
