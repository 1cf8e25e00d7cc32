"""Gradients of many small tensors side by side: one kernel answers for all of them.

A model has a bias, a scale or a shift for every matrix, and small models have many matrices of one
size. A question to each on its own costs more in calls than in arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cost import JOINED, scratch
from ..dense import Dense
from ..form import Form
from ..outer import Outer


class Stacked:
    """Gradients of several tensors as one form."""

    __slots__ = ()
    shapes: dict[str, torch.Size]

    def split(self, total: Tensor) -> dict[str, Tensor]:
        """A sum over samples as every tensor's own sum."""
        raise NotImplementedError


class StackedRows(Stacked, Dense):
    """gᵢ of several tensors, one after the other in row i."""

    __slots__ = ("shapes",)

    def __init__(self, forms: Mapping[str, Dense]) -> None:
        each = [form.values for form in forms.values()]
        super().__init__(
            torch.cat([v if v.dim() == 2 else v.reshape(v.shape[0], -1) for v in each], 1)
        )
        self.shapes = {name: form.shape for name, form in forms.items()}

    def without(self, bad: Tensor) -> StackedRows:
        """Zero rows for some samples."""
        cleared = object.__new__(StackedRows)
        Dense.__init__(cleared, self.values.masked_fill(bad.unsqueeze(1), 0))
        cleared.shapes = self.shapes
        return cleared

    def split(self, total: Tensor) -> dict[str, Tensor]:
        """A sum over samples as every tensor's own sum."""
        parts = total.split([shape.numel() for shape in self.shapes.values()])
        return _shaped(parts, self.shapes)


class StackedProducts(Stacked, Outer):
    """Outer products of one position for several matrices of one size: a block for each."""

    __slots__ = ("shapes",)

    def __init__(self, forms: Mapping[str, Outer]) -> None:
        left = torch.stack([form.given[0] for form in forms.values()], 1).unsqueeze(2)
        right = torch.stack([form.given[1] for form in forms.values()], 1).unsqueeze(2)
        shape = torch.Size((len(forms), left.shape[3], right.shape[3]))
        super().__init__(left, right, shape)
        self.shapes = {name: form.shape for name, form in forms.items()}

    def without(self, bad: Tensor) -> StackedProducts:
        """Zero factors for some samples."""
        cleared, whole = object.__new__(StackedProducts), Outer.without(self, bad)
        Outer.__init__(cleared, *whole.given, self.shape)
        cleared.shapes = self.shapes
        return cleared

    def split(self, total: Tensor) -> dict[str, Tensor]:
        """A sum over samples as every tensor's own sum."""
        return _shaped(total.unbind(), self.shapes)


def _shaped(parts: Sequence[Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    named = zip(parts, shapes.items(), strict=True)
    return {name: x if x.shape == shape else x.view(shape) for x, (name, shape) in named}


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
            some = {next(iter(some)): StackedRows(some) if kind is None else StackedProducts(some)}
        found |= some
    return found
