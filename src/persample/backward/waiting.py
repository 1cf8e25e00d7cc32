"""Small layers of one size: what their taps brought waits, and its forms are made together.

A model of many small layers spends its time on calls, not on arithmetic. A query about all of its
parameters puts layers of one size side by side: one call serves all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..forms import JOINED, Form, stack_layers
from ..uses import Firing, Operand, Use, versions
from .contribution import Contribution
from .rule_choice import forms_of

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
        x, grad = self.watched
        forms, rule = forms_of(self.use, Firing((x,), (grad,)), len(x), {}, positions=False)
        found = []
        for operand, form in zip(self.use.operands, forms, strict=True):
            assert isinstance(form, Form)
            found.append(Contribution(self.use, operand, form, rule, None))
            found[-1].keep()
        return found


def wait(use: Use, x: Tensor, grad: Tensor | None, n: int | None) -> Waiting | None:
    """What a small linear layer brought, with one position per sample; else None."""
    if grad is None or not x.dim() == grad.dim() == 2 or not x.shape[0] == grad.shape[0] == n:
        return None
    if x.dtype is not grad.dtype or x.dtype not in _DTYPES:
        return None
    return Waiting(use, x, grad) if 0 < x.numel() + grad.numel() <= JOINED else None


def join_waiting(
    waiting: Iterable[Waiting], names: Collection[str]
) -> tuple[dict[str, Form], list[Waiting]]:
    """Forms of layers side by side; and what waits of others than ``names``, or alone of its size.

    Each of the names must have one use at most.
    """
    groups: dict[Any, list[Waiting]] = {}
    found: dict[str, Form] = {}
    others: list[Waiting] = []
    for one in waiting:
        if all(operand.name in names for operand in one.use.operands):
            x, grad = one.watched
            key = (x.shape, grad.shape, x.dtype, x.device, len(one.use.operands))
            groups.setdefault(key, []).append(one)
        else:
            others.append(one)
    for some in groups.values():
        if len(some) == 1:
            others += some
            continue
        inputs, grads = zip(*[one.watched for one in some], strict=True)
        each = zip(*[one.use.operands for one in some], strict=True)
        shapes = [{o.name: o.value.shape for o in operands if o.name} for operands in each]
        found |= stack_layers(grads, inputs, shapes[0], shapes[1] if len(shapes) > 1 else {})
    return found, others
