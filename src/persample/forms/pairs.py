"""Norms of sums of outer products, from their factors (n, k, t, a) and (n, k, t, b)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .cost import scratch, spans
from .form import real, squared, wide
from .sharing import products


def widened(left: Tensor, right: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Some samples' factors, in float32 at least."""
    if last - first != left.shape[0]:
        left, right = left[first:last], right[first:last]
    dtype = wide(left.dtype)
    return (left, right) if dtype is left.dtype else (left.to(dtype), right.to(dtype))


def by_pairs(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Σₜₛ ⟨lₜ, lₛ⟩⟨rₜ, rₛ⟩, and its diagonal, the energy."""
    n, k, t, _ = left.shape
    item = 2 * k * t * t * wide(left.dtype).itemsize
    if item > scratch():
        return _by_blocks(left, right)
    found, energy = [], []
    for first, last in spans(n, item, 4 << 20):  # in cache
        some, other = widened(left, right, first, last)
        both = products(left, some, first, last) * products(right, other, first, last)
        found.append(both.sum((1, 2, 3)).clamp_(min=0))
        energy.append(both.diagonal(dim1=2, dim2=3).sum((1, 2)))
    if len(found) == 1:
        return found[0], energy[0]
    if not found:
        zeros = right.new_zeros(0, dtype=real(right.dtype))
        return zeros, zeros.clone()
    return torch.cat(found), torch.cat(energy)


def _by_blocks(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Sample by sample where t × t does not fit: blocks on and above the diagonal."""
    n, k, t, _ = left.shape
    found = right.new_zeros(n, dtype=real(right.dtype))
    energy = torch.zeros_like(found)
    side = max(1, math.isqrt(scratch() // (2 * k * wide(left.dtype).itemsize)))
    for i in range(n):
        one, two = (f[0] for f in widened(left, right, i, i + 1))
        for row in range(0, t, side):
            mine, other = one[:, row : row + side], two[:, row : row + side]
            sizes = torch.linalg.vector_norm(mine, dim=2) * torch.linalg.vector_norm(other, dim=2)
            energy[i] += sizes.square().sum()
            for column in range(row, t, side):
                both = torch.matmul(mine, one[:, column : column + side].mT)
                both *= torch.matmul(other, two[:, column : column + side].mT)
                found[i] += both.sum() * (1 if row == column else 2)
    return found.clamp_(min=0), energy


def written_out(left: Tensor, right: Tensor) -> Tensor:
    """‖Σₜ lₜ ⊗ rₜ‖², a few samples at a time, so that the matrices stay in cache."""
    n, k, _, a = left.shape
    found = right.new_zeros(n, dtype=real(right.dtype))
    line = k * right.shape[3] * wide(right.dtype).itemsize
    for first, last in spans(n, a * line, 4 << 20):
        some, other = widened(left, right, first, last)
        for start, stop in spans(a, line * (last - first)):
            matrix = torch.matmul(some[..., start:stop].transpose(2, 3), other)
            found[first:last] += squared(matrix)
    return found


def energies(left: Tensor, right: Tensor) -> Tensor:
    """Σₜ ‖lₜ‖²‖rₜ‖², the scale of what rounding can hide."""
    one, two = (torch.linalg.vector_norm(f, dim=3) for f in widened(left, right, 0, left.shape[0]))
    found: Tensor = (one * two).square_().sum((1, 2))
    return found
