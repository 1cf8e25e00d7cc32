"""Small layers: what their taps brought waits for a query, and is asked together.

A model of many small layers spends its time on calls, not on arithmetic. A query about all of its
parameters asks layers with one position per sample by their factors, all of them at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..forms import JOINED, Form, Layer, join_layers
from ..rules.linear import linear
from ..uses import Firing, Operand, Use, versions
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
    """Of a layer's weight and bias, by its rule: every use of the layer is a position."""
    x, grad = uses[0].watched
    if len(uses) > 1:
        x, grad = [torch.stack(side, 1) for side in zip(*[u.watched for u in uses], strict=True)]
    forms = linear(uses[0].use, Firing((x,), (grad,)), x.shape[0])
    return [form for form in forms if isinstance(form, Form)]


def join_waiting(
    waiting: Iterable[Waiting], missing: set[str], parts: dict[str, list[Form]]
) -> dict[str, Form]:
    """Layers side by side, of parameters that are ``missing``.

    What has several uses, or parameters of other layers or ``parts``, is added to these.
    """
    layers: dict[tuple[str, ...], list[Waiting]] = {}
    for one in waiting:
        names = tuple([operand.name or "" for operand in one.use.operands])
        layers.setdefault(names, []).append(one)
    free, each = missing.difference(parts), list(chain.from_iterable(layers))
    if len(set(each)) < len(each):
        free -= {name for name, count in Counter(each).items() if count > 1}
    once: list[Layer] = []
    for names, uses in layers.items():
        if len(uses) == 1 and free.issuperset(names):
            x, grad = uses[0].watched
            once.append((grad, x, names))
        else:
            for name, form in zip(names, _forms(uses), strict=True):
                if name in missing:
                    parts.setdefault(name, []).append(form)
    return join_layers(once) if once else {}
