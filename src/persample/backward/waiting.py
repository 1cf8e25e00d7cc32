"""Small layers: what their taps brought waits for a query, and is asked together.

A model of many small layers spends its time on calls, not on arithmetic. A query about all of its
parameters asks layers with one position per sample by their factors, all of them at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..forms import JOINED, Dense, Form, Outer, join_layers
from ..uses import Operand, Use, versions
from .contribution import Contribution

_DTYPES = (torch.float32, torch.float64)


class Waiting:
    """The input and the output gradient (``watched``) of one use."""

    __slots__ = ("use", "versions", "watched")

    def __init__(self, use: Use, x: Tensor, grad: Tensor) -> None:
        self.use = use
        self.watched: Sequence[Tensor] = (x, grad)
        self.versions = versions(self.watched)

    @property
    def operand(self) -> Operand:
        """The first of its parameters."""
        return self.use.operands[0]

    def relies(self, by_hand: Collection[Any]) -> bool:
        """Its answers are computed from what is kept alone."""
        return False

    def overwritten(self) -> bool:
        """Whether what is kept was written to."""
        return versions(self.watched) != self.versions

    def contributions(self) -> list[Contribution]:
        """Its forms, as if it had not waited."""
        found = []
        for operand, form in zip(self.use.operands, _forms([self]), strict=True):
            found.append(Contribution(self.use, operand, form, self.use.operator, None))
            found[-1].keep()
        return found


def wait(use: Use, x: Tensor, grad: Tensor | None, n: int | None) -> Waiting | None:
    """What a small linear layer brought, with one position per sample; else None."""
    if grad is None or not x.dim() == grad.dim() == 2 or not x.shape[0] == grad.shape[0] == n:
        return None
    if x.dtype is not grad.dtype or x.dtype not in _DTYPES:
        return None
    return Waiting(use, x, grad) if 0 < x.numel() + grad.numel() <= JOINED else None


def _forms(uses: Sequence[Waiting]) -> list[Form]:
    """Of a layer's weight and bias: every use of the layer is a position."""
    x, grad = uses[0].watched
    if len(uses) > 1:
        x, grad = [torch.stack(side, 1) for side in zip(*[u.watched for u in uses], strict=True)]
    weight, *bias = uses[0].use.operands
    found: list[Form] = [Outer(grad, x, weight.value.shape)]
    return [*found, Dense(grad.sum(1) if len(uses) > 1 else grad)] if bias else found


def join_waiting(
    waiting: Iterable[Waiting], names: Collection[str], used: Container[str]
) -> tuple[dict[str, Form], dict[str, Form], list[Waiting]]:
    """What waits of some parameters: layers side by side, other forms, and what is left.

    What is left has parameters with other uses, or with those that are ``used`` already.
    """
    layers: dict[Any, list[Waiting]] = {}
    for one in waiting:
        key = tuple([operand.name for operand in one.use.operands])
        if any(name in names for name in key):
            layers.setdefault((key, one.watched[0].dtype), []).append(one)
    counts = Counter(name for key, _ in layers for name in key)
    found: dict[str, Form] = {}
    once: dict[Any, Any] = {}
    left: list[Waiting] = []
    for (key, dtype), uses in layers.items():
        if not all(name in names and name not in used and counts[name] == 1 for name in key):
            left += uses
        elif len(uses) > 1:
            found.update(zip(key, _forms(uses), strict=True))
        else:
            once.setdefault((dtype, uses[0].watched[0].device), {})[key] = uses[0]
    joined: dict[str, Form] = {}
    for some in once.values():
        if len(some) == 1:
            ((key, one),) = some.items()
            found.update(zip(key, _forms([one]), strict=True))
        else:
            each = [(*reversed(one.watched), key) for key, one in some.items()]
            joined[each[0][2][0]] = join_layers(each)
    return joined, found, left
