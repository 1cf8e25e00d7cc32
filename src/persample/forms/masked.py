"""The rows of a form, without those of some samples."""

from __future__ import annotations

import torch
from torch import Tensor

from .form import Form
from .mapped import Composite


class Masked(Composite):
    """Zero for ``bad`` samples; the others' rows are computed as they are with them.

    What is computed in another way is rounded in another way, and norms come from these very rows.
    """

    __slots__ = ("bad", "form")

    def __init__(self, form: Form, bad: Tensor) -> None:
        super().__init__([form], form.n, form.shape, form.dtype, form.device)
        self.form, self.bad = form, bad

    def row_bytes(self) -> int:
        """As before, so that as many rows are computed at a time."""
        return self.form.row_bytes()

    def without(self, bad: Tensor) -> Masked:
        """Zero for more samples."""
        return Masked(self.form, self.bad | bad)

    def narrowed(self, first: int, last: int) -> Masked:
        """Some of the samples."""
        return Masked(self.form.narrowed(first, last), self.bad[first:last])

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """The form's rows, some of them zero."""
        return self._clear(self.form.dense(first, last), first, last)

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """The form's wide rows, some of them zero."""
        return self._clear(self.form.wide_dense(first, last), first, last)

    def _clear(self, rows: Tensor, first: int, last: int | None) -> Tensor:
        bad = self.bad[first:last].view(-1, *[1] * len(self.shape))
        return torch.where(bad, torch.zeros((), dtype=rows.dtype, device=rows.device), rows)
