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


def _stack_rows(forms: Mapping[str, Form]) -> Stacked:
    """One tensor's elements after the other's, in every row; products are written out."""
    rows: list[Tensor] = []
    shapes: dict[str, torch.Size] = {}
    for name, form in forms.items():
        stacked = form if isinstance(form, Stacked) else Stacked(form, {name: form.shape})
        dense = stacked.form.dense()
        rows.append(dense if dense.dim() == 2 else dense.reshape(dense.shape[0], -1))
        shapes |= stacked.shapes
    return Stacked(Dense(torch.cat(rows, 1)), shapes)


def _stack_products(forms: dict[str, Form]) -> dict[str, Form]:
    """Outer products of one position, of matrices of one size: a block for each."""
    if len(forms) == 1:
        return forms
    sides = zip(*[form.tensors() for form in forms.values()], strict=True)
    left, right = [torch.stack(side, 1) for side in sides]
    return _blocks(left, right, {name: form.shape for name, form in forms.items()})


def _blocks(left: Tensor, right: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Form]:
    """Outer products of factors (n, blocks, …), under the first one's name."""
    shape = torch.Size((left.shape[1], left.shape[2], right.shape[2]))
    outer = Outer(left.unsqueeze(2), right.unsqueeze(2), shape)
    return {next(iter(shapes)): Stacked(outer, shapes)}


def stack_layers(
    grads: Sequence[Tensor], inputs: Sequence[Tensor], weights: Mapping[str, torch.Size],
    biases: Mapping[str, torch.Size],
) -> dict[str, Form]:  # fmt: skip
    """The forms of linear layers of one size, with one position per sample."""
    left = torch.stack(list(grads), 1)
    found = _blocks(left, torch.stack(list(inputs), 1), weights)
    if biases:
        found[next(iter(biases))] = Stacked(Dense(left.flatten(1)), biases)
    return found


Group = dict[str, Form]


def _kinds(forms: Mapping[str, Form]) -> tuple[Group, list[Group], list[list[Group]]]:
    """Forms by what is joined with what: none, products of one size, rows of one dtype.

    What is written out in a few calls is joined as rows, larger products by their size. The copies
    take a quarter of the budget at most.
    """
    alone: dict[str, Form] = {}
    rows: dict[Any, list[dict[str, Form]]] = {}
    products: dict[Any, dict[str, Form]] = {}
    room = scratch() // 4
    for name, form in forms.items():
        dtype, alike = form.dtype, (form.dtype, form.device)
        count = _copied(form) if dtype in (torch.float32, torch.float64) else 0
        if not 0 < count * dtype.itemsize <= room:
            alone[name] = form
            continue
        room -= count * dtype.itemsize
        if isinstance(form, Outer) and form.given[0].dim() == 2:
            products.setdefault((*alike, form.key()), {})[name] = form
        else:
            rows.setdefault(alike, []).append({name: form})
    large: list[dict[str, Form]] = []
    for (*alike, _), some in products.items():
        short = sum(form.n * form.size for form in some.values()) <= JOINED
        (rows.setdefault(tuple(alike), []) if short else large).append(some)
    return alone, large, list(rows.values())


def stack_forms(forms: Mapping[str, Form]) -> dict[str, Form]:
    """The same forms, small ones of one dtype and device joined under the first one's name."""
    found, products, rows = _kinds(forms)
    for some in products:
        found |= _stack_products(some)
    for groups in rows:
        joined = {name: form for some in groups for name, form in _stack_products(some).items()}
        found |= {next(iter(joined)): _stack_rows(joined)} if len(joined) > 1 else joined
    return found


def name_joined(forms: Mapping[str, Form]) -> dict[str, str]:
    """How norms of forms that are joined with others are computed."""
    _, products, rows = _kinds(forms)
    found = {name: "one position, joined" for some in products if len(some) > 1 for name in some}
    for groups in rows:
        some = {name: form for members in groups for name, form in members.items()}
        for name, form in some.items() if len(some) > 1 else ():
            found[name] = "stored rows, joined" if isinstance(form, Dense) else "rows, joined"
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
