"""Products of positions that several parameters need: q, k and v of the same data.

While norms of many parameters are computed, the products of a factor that several of them share
are kept until its last use.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..cost import scratch
from ..rounding import THIN

Key = tuple[Any, ...]
_LONG = 256


class Shared:
    """How often each factor is still needed, and the products that are kept for it."""

    def __init__(self, factors: Iterable[Tensor]) -> None:
        self.left = Counter(f.data_ptr() for f in factors)
        self.kept: dict[Key, Tensor] = {}

    def products(self, factor: Tensor, part: Tensor, first: int, last: int) -> Tensor:
        """``part @ part.mT`` of some samples of a factor."""
        at, n = factor.data_ptr(), factor.shape[0]
        if self.left[at] < 2 and not self.kept:
            return _squared(part)
        key = at, factor.shape, factor.stride(), factor.dtype, first, last
        found = self.kept.get(key)
        if found is None:
            found = _squared(part)
            if self.left[at] > 1 and found.nbytes * n // (last - first) <= scratch():
                self.kept[key] = found
        if last == n:
            self.left[at] -= 1
        if self.left[at] <= 0:
            self.kept = {k: v for k, v in self.kept.items() if k[0] != at}
        return found


_CURRENT: ContextVar[Shared | None] = ContextVar("shared products", default=None)


@contextlib.contextmanager
def share_products(factors: Iterable[Tensor]) -> Iterator[None]:
    """Keep products that these factors (each named once per use) have in common."""
    token = _CURRENT.set(Shared(factors))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def products(factor: Tensor, part: Tensor, first: int, last: int) -> Tensor:
    """⟨row t, row s⟩ for every sample first … last-1, not to be written to."""
    shared = _CURRENT.get()
    if shared is None:
        return _squared(part)
    return shared.products(factor, part, first, last)


def _squared(part: Tensor) -> Tensor:
    return rows_by_rows(part, part)


def rows_by_rows(one: Tensor, two: Tensor) -> Tensor:
    """⟨row t, row s⟩ of matrices (…, t, a) and (…, s, a).

    Products of few rows are added up in one go, however long they are: long ones are cut.
    """
    length = one.shape[-1]
    if length > _LONG and min(one.shape[-2], two.shape[-2]) < THIN:
        whole = length // _LONG * _LONG
        cut = [
            f[..., :whole].unflatten(-1, (-1, _LONG)).transpose(-2, -3).contiguous()
            for f in ((one,) if one is two else (one, two))
        ]
        found = torch.matmul(cut[0], cut[-1].mT).sum(-3)
        if whole < length:
            found += torch.matmul(one[..., whole:], two[..., whole:].mT)
        return found
    if one.dim() == two.dim() == 3:  # matmul would look for axes to broadcast
        return torch.bmm(one, two.mT)
    return torch.matmul(one, two.mT)
