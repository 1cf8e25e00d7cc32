"""Gradients of many small tensors side by side: one kernel answers for all of them.

A model has a bias, a scale or a shift for every matrix, and small models have many matrices of one
size. A question to each on its own costs more in calls than in arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..cost import JOINED, scratch
from ..dense import Dense
from ..form import Form
from ..mapped import Mapped
from ..outer import Outer
from ..rounding import Norms


class Stacked(Mapped):
    """Gradients of several tensors, side by side in the rows or in the blocks of one form."""

    __slots__ = ("shapes",)

    def __init__(self, form: Form, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__(form, form.shape, form.dtype, form.device)
        self.shapes = shapes

    def of(self, form: Form) -> Stacked:
        """The same tensors of another form."""
        return Stacked(form, self.shapes)

    def norms(self) -> Norms:
        """Those of all tensors together."""
        return self.form.norms()

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """The sums of all tensors together."""
        return self.form.weighted_sum(c, certain=certain)

    def split(self, total: Tensor) -> dict[str, Tensor]:
        """A sum over samples as every tensor's own sum."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = total.split(sizes) if total.dim() == 1 else total.unbind()
        named = zip(parts, self.shapes.items(), strict=True)
        return {name: x if x.shape == shape else x.view(shape) for x, (name, shape) in named}


def _stack_rows(forms: Iterable[Dense]) -> Dense:
    """One tensor's elements after the other's, in every row."""
    each = [form.values for form in forms]
    return Dense(torch.cat([v if v.dim() == 2 else v.reshape(v.shape[0], -1) for v in each], 1))


def _stack_products(forms: Iterable[Outer]) -> Outer:
    """Outer products of one position, of matrices of one size: a block for each."""
    sides = zip(*[form.given for form in forms], strict=True)
    left, right = [torch.stack(side, 1).unsqueeze(2) for side in sides]
    return Outer(left, right, torch.Size((left.shape[1], left.shape[3], right.shape[3])))


def stack_forms(forms: Mapping[str, Form]) -> dict[str, Form]:
    """The same forms, small ones of one kind, dtype and device joined under the first one's name.

    The copies take a quarter of the budget at most.
    """
    found: dict[str, Form] = {}
    alike: dict[Any, dict[str, Any]] = {}
    room = scratch() // 4
    for name, form in forms.items():
        count, kind = 0, None
        if isinstance(form, Dense):
            count = form.values.numel()
        elif form.__class__ is Outer and form.given[0].dim() == 2:  # one position, one block
            left, right = form.given
            count, kind = left.numel() + right.numel(), (left.shape[1], right.shape[1])
        size, dtype = count * form.dtype.itemsize, form.dtype
        if 0 < count <= JOINED and size <= room and dtype in (torch.float32, torch.float64):
            room -= size
            alike.setdefault((kind, dtype, form.device), {})[name] = form
        else:
            found[name] = form
    for (kind, *_), some in alike.items():
        if len(some) > 1:
            stack = _stack_rows if kind is None else _stack_products
            shapes = {name: form.shape for name, form in some.items()}
            some = {next(iter(some)): Stacked(stack(some.values()), shapes)}
        found |= some
    return found
