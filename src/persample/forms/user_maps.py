"""Gradients that pass through code of the user's own on their way from weights to parameters.

A hook, or a custom function's backward, may do what it likes with a gradient: clamp it, normalise
it, take its sign. Sums over samples or over uses cannot go through it in place of each sample's
whole gradient, so every query uses rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .form import Form
from .mapped import Composite
from .masked import Masked
from .walk import walk_rows


class Joint(Composite):
    """gᵢ = P(h¹ᵢ, h²ᵢ, …): one form for every use of what was computed from the parameter."""

    __slots__ = ("edges", "parameter")

    def __init__(self, forms: Sequence[Form], edges: Sequence[Any], parameter: Tensor) -> None:
        super().__init__(forms, forms[0].n, parameter.shape, parameter.dtype, parameter.device)
        self.edges, self.parameter = list(edges), parameter

    def work(self) -> int:
        """That of rows of the parameter."""
        return self.n * self.size

    def row_bytes(self) -> int:
        """A row of every use and one of the parameter."""
        return super().row_bytes() + sum(form.row_bytes() for form in self.forms)

    def narrowed(self, first: int, last: int) -> Joint:
        """Some samples of all uses."""
        return Joint([f.narrowed(first, last) for f in self.forms], self.edges, self.parameter)

    def without(self, bad: Tensor) -> Form:
        """Zeros in the rows: nothing says that zeros stay zeros."""
        return Masked(self, bad)

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """All rows in one batched backward pass where torch can, else row by row."""
        seeds = [form.dense(first, last) for form in self.forms]
        count = seeds[0].shape[0]
        if count == 0:
            return torch.zeros((0, *self.shape), dtype=self.dtype, device=self.device)
        found = walk_rows(self.edges, [self.parameter], seeds)[0]
        if found is None:
            return torch.zeros((count, *self.shape), dtype=self.dtype, device=self.device)
        return found


def join_uses(forms: Sequence[Joint]) -> Joint:
    """The uses of all of them, in one."""
    return Joint(
        [f for form in forms for f in form.forms],
        [e for form in forms for e in form.edges],
        forms[0].parameter,
    )
