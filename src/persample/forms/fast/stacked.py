"""Gradients of many small tensors side by side: one kernel answers for all of them.

A model has a bias, a scale or a shift for every matrix, and small models have many matrices of one
size. A question to each on its own costs more in calls than in arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cost import JOINED, WORK, WRITTEN, scratch
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

    def __init__(self, forms: Mapping[str, Form]) -> None:
        each = [form.dense() for form in forms.values()]
        super().__init__(
            torch.cat([v if v.dim() == 2 else v.reshape(v.shape[0], -1) for v in each], 1)
        )
        self.shapes = {}
        for name, form in forms.items():
            self.shapes |= form.shapes if isinstance(form, Stacked) else {name: form.shape}

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
    """The same forms, small ones of one dtype and device joined under the first one's name.

    What is written out in a few calls is joined as rows, other products with those of their size.
    The copies take a quarter of the budget at most.
    """
    found: dict[str, Form] = {}
    rows: dict[Any, dict[str, Form]] = {}
    products: dict[Any, dict[str, Outer]] = {}
    room = scratch() // 4
    for name, form in forms.items():
        dtype, alike = form.dtype, (form.dtype, form.device)
        count = _copied(form) if dtype in (torch.float32, torch.float64) else 0
        if not 0 < count * dtype.itemsize <= room:
            found[name] = form
            continue
        room -= count * dtype.itemsize
        if form.__class__ is Outer and form.given[0].dim() == 2:
            products.setdefault((*alike, form.key()), {})[name] = form
        else:
            rows.setdefault(alike, {})[name] = form
    for (*alike, _), some in products.items():
        first = next(iter(some))
        form = StackedProducts(some) if len(some) > 1 else some[first]
        short = form.n * form.size <= JOINED
        (rows.setdefault(tuple(alike), {}) if short else found)[first] = form
    for some in rows.values():
        found |= {next(iter(some)): StackedRows(some)} if len(some) > 1 else some
    return found


def _copied(form: Form) -> int:
    """Elements that are copied to join a form with others; 0 if it is not small."""
    if isinstance(form, Dense):
        return count if (count := form.values.numel()) <= JOINED else 0
    if form.__class__ is not Outer:
        return 0
    left, right = form.given
    if left.dim() == 2:  # one position, one block
        return count if (count := left.numel() + right.numel()) <= JOINED else 0
    count = form.n * form.size
    return count if count <= WRITTEN and form.work() <= WORK else 0
