"""Banded matrix factorization: noise correlated over b steps, made by a short recurrence.

The strategy is the lower triangular Toeplitz matrix whose first column is c₀ … c_{b−1}, the
square root of the prefix sum cut to b bands. What is released in T steps is the rows of
G + strategy⁻¹ · Z, where G holds the clipped sums and Z white noise of :attr:`Plan.noise_std`.
A record takes part in every b-th step at most, where columns of the strategy do not overlap: so
each part is one Gaussian release of sensitivity C · (column norm).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import UsageError


@lru_cache
def coefficients(bands: int) -> tuple[float, ...]:
    """c_k = binom(2k, k) / 4ᵏ for k < b: 1, 1/2, 3/8, 5/16 and so on."""
    found = [1.0]
    for k in range(1, bands):
        found.append(found[-1] * (2 * k - 1) / (2 * k))
    return tuple(found)


def column_norm(bands: int) -> float:
    """The norm of the strategy's largest column, (Σ c_k²)^½ over k < b; 1 for one band."""
    return math.sqrt(math.fsum(c * c for c in coefficients(bands)))


def strategy(bands: int, steps: int) -> Tensor:
    """The strategy as a (T, T) matrix in float64: for tests and for reading.

    >>> from persample.private import banded
    >>> banded.strategy(2, 3)
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 1.0000, 0.0000],
            [0.0000, 0.5000, 1.0000]], dtype=torch.float64)
    """
    found = torch.zeros(steps, steps, dtype=torch.float64)
    for k, c in enumerate(coefficients(bands)[:steps]):
        found.diagonal(-k).fill_(c)
    return found


def correlated(white: Tensor, past: Sequence[Tensor], *, bands: int) -> Tensor:
    """Row t of strategy⁻¹ · Z: w_t = z_t − Σ c_k w_{t−k} over 1 ≤ k < b.

    >>> import torch
    >>> from persample.private import banded
    >>> first = banded.correlated(torch.ones(2), [], bands=3)
    >>> banded.correlated(torch.ones(2), [first], bands=3)
    tensor([0.5000, 0.5000])

    Args:
        white: z_t, fresh white noise of any shape; it is not written to.
        past: w_{t−1}, w_{t−2}, …: what this function returned before, the latest first. All
            b − 1 of them, fewer only in the first steps. More are ignored.
        bands: b.
    """
    found = white.clone()
    for c, before in zip(coefficients(bands)[1:], past, strict=False):
        if before.shape != white.shape:
            raise UsageError(
                f"noise {tuple(white.shape)} follows noise {tuple(before.shape)}",
                fix="keep the past noise of every parameter apart",
            )
        found.sub_(before, alpha=c)
    return found


def group(step: int, *, bands: int) -> int:
    """The group of records from which a step (counted from 0) draws."""
    return step % bands
