"""Norms of several small tensors from products of positions, multiplied and judged together.

Whatever the sides of its matrix, a layer's products of positions are (n, t, t): those of layers
with as many positions are side by side like the blocks of one matrix. A sum would need one more
product for each of them, so rows that serve both are cheaper where a sum follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..cost import JOINED
from ..form import Form, add_all
from ..outer import Outer
from ..position_products import Shared
from ..rounding import Norms, multiply_products, run_of, sq_error_of_products, units

_PAYS = 1 << 22  # multiplications that take more time than the calls of products of positions


class Sequences(Form):
    """Outer products over positions, of one n, t and dtype, for norms alone."""

    __slots__ = ("forms",)

    def __init__(self, forms: Sequence[Outer]) -> None:
        one = forms[0]
        super().__init__(one.n, torch.Size(), one.dtype, one.device)
        self.forms = forms

    def norms(self) -> Norms:
        """Those of all tensors together: of one matrix with as many blocks."""
        forms, sides = self.forms, [form.key()[1:] for form in self.forms]
        shared = Shared(factor for form in forms for factor in form.given)
        one, two = [
            torch.stack([shared.products(f.given[k], f.given[k], 0, self.n) for f in forms], 1)
            for k in (0, 1)
        ]
        a, b = (max(side) for side in zip(*sides, strict=True))
        value, doubt, diagonals = multiply_products(one, two, a, b)
        run = max([run_of(forms[0].t, *side) for side in sides])
        return Norms(
            value, doubt, lambda: sq_error_of_products(diagonals, doubt, run, max(a, b)),
            units(max([form.size for form in forms])) + len(forms),
            exact=lambda which: add_all([form.exactly(which) for form in forms]),
        )  # fmt: skip


def by_positions(forms: Mapping[str, Form]) -> list[dict[str, Outer]]:
    """Those of forms of one dtype whose norms take far less time this way than from rows."""
    alike: dict[Any, dict[str, Outer]] = {}
    for name, form in forms.items():
        if type(form) is Outer and form.given[0].dim() == 3:
            n, t, _ = form.given[0].shape
            if t > 1 and n * t * t <= JOINED:
                alike.setdefault((n, t), {})[name] = form
    return [some for some in alike.values() if len(some) > 1 and _saved(some) > _PAYS]


def _saved(forms: Mapping[str, Outer]) -> int:
    """Multiplications that writing rows out would take beyond products of positions."""
    return sum([form.work() - form.plan().cost for form in forms.values()])
