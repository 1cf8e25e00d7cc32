"""Random projections that depend on seed, name, shape and dim alone."""

from __future__ import annotations

import hashlib
import math
import random

import torch
from torch import Tensor


class Sketch:
    """A two-sided map of a tensor seen as a matrix (first axis, rest): Sₐ G S_bᵀ, flattened.

    Entries of both factors are ±1/√k, so E⟨S g, S h⟩ = ⟨g, h⟩. Nothing of size parameters × dim is
    ever made.
    """

    __slots__ = ("columns", "dim", "rows", "shape")

    def __init__(
        self, name: str, shape: torch.Size, dim: int, seed: int, device: torch.device
    ) -> None:
        self.shape, self.dim = shape, dim
        a = shape[0] if len(shape) > 1 else 1
        b = shape.numel() // a if a else 0
        few, many = _split(dim, a)
        key = f"{seed}|{name}|{tuple(shape)}|{dim}".encode()
        number = int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1
        generator = torch.Generator().manual_seed(number)
        self.rows = _signs(few, a, generator, device)
        self.columns = _signs(many, b, generator, device)

    def nbytes(self) -> int:
        """Bytes of both factors."""
        return 4 * (self.rows.numel() + self.columns.numel())

    def fits(self, a: int, b: int) -> bool:
        """Whether a factorisation (a, b) is the matrix this sketch is for."""
        return self.rows.shape[1] == a and self.columns.shape[1] == b

    def of_rows(self, rows: Tensor) -> Tensor:
        """The sketch of dense gradients: (n, dim)."""
        if rows.is_complex():
            rows = torch.view_as_real(rows.resolve_conj())
        left, right = self.rows.to(rows.dtype), self.columns.to(rows.dtype)
        if left.shape == (1, 1):  # a vector: one sign before all others
            return torch.mm(rows.reshape(rows.shape[0], right.shape[1]), right.T).mul_(left)
        matrix = rows.reshape(rows.shape[0], left.shape[1], right.shape[1])
        return torch.matmul(torch.matmul(left, matrix), right.T).flatten(1)


KEPT = 64 << 20  # bytes of sketches that are kept for the next batch
_kept: dict[tuple[str, torch.Size, int, int, torch.device], Sketch] = {}
_chance = random.Random(0)  # whom to drop: neither oldest nor newest suits a loop over parameters


def kept_sketch(name: str, shape: torch.Size, dim: int, seed: int, device: torch.device) -> Sketch:
    """Kept from an earlier batch if there is room: drawing one costs as much as using it."""
    key = (name, shape, dim, seed, device)
    found = _kept.get(key)
    if found is None:
        found = Sketch(name, shape, dim, seed, device)
        if found.nbytes() <= KEPT // 8:
            while _kept and sum(s.nbytes() for s in _kept.values()) + found.nbytes() > KEPT:
                _kept.pop(_chance.choice(list(_kept)), None)
            _kept[key] = found
    return found


def _split(dim: int, a: int) -> tuple[int, int]:
    """Dim = few · many with few close to the square root, and 1 for a vector."""
    if a == 1:
        return 1, dim
    few = next(d for d in range(math.isqrt(dim), 0, -1) if dim % d == 0)
    return few, dim // few


def _signs(k: int, size: int, generator: torch.Generator, device: torch.device) -> Tensor:
    bits = torch.randint(0, 2, (k, size), generator=generator, dtype=torch.int8, device="cpu")
    return (bits.to(device).to(torch.float32) * 2 - 1) / math.sqrt(k)
