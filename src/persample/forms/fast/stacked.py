"""Rows of many small tensors side by side: one kernel answers for all of them.

A model has a bias, a scale or a shift for every matrix. Their rows are short, and a question to
each on its own costs more in calls than in arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..cost import JOINED, scratch
from ..dense import Dense
from ..form import Form, wide


class Stacked(Dense):
    """gᵢ of several tensors, one after the other in row i."""

    __slots__ = ("shapes",)

    def __init__(self, forms: Mapping[str, Dense]) -> None:
        flat = [f.values.reshape(f.n, f.size) for f in forms.values()]
        super().__init__(torch.cat(flat, 1))
        self.shapes = {name: form.shape for name, form in forms.items()}

    def without(self, bad: Tensor) -> Stacked:
        """Zero rows for some samples."""
        cleared = object.__new__(Stacked)
        Dense.__init__(cleared, self.values.masked_fill(bad.unsqueeze(1), 0))
        cleared.shapes = self.shapes
        return cleared

    def split(self, total: Tensor) -> dict[str, Tensor]:
        """A sum over samples as every tensor's own sum."""
        parts = total.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape)
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }


def stack_forms(forms: Mapping[str, Form]) -> dict[str, Form]:
    """The same forms, small rows of one dtype and device joined under the first one's name.

    The copies take a quarter of the budget at most.
    """
    found: dict[str, Form] = {}
    small: dict[tuple[torch.dtype, torch.device], dict[str, Dense]] = {}
    room = scratch() // 4
    for name, form in forms.items():
        if isinstance(form, Dense) and _fits(form) and form.nbytes() <= room:
            room -= form.nbytes()
            small.setdefault((form.dtype, form.device), {})[name] = form
        else:
            found[name] = form
    for rows in small.values():
        found[next(iter(rows))] = Stacked(rows) if len(rows) > 1 else next(iter(rows.values()))
    return found


def _fits(form: Dense) -> bool:
    dtype = form.dtype
    return form.values.numel() <= JOINED and dtype == wide(dtype) and not dtype.is_complex
