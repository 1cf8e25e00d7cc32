"""The gradients of an operator without a rule: computed by its own backward on demand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .dense import Dense
from .form import Form, wide
from .masked import Masked


class Replay(Form):
    """Rows come from ``rows(first, last)``, weighted sums from ``sums(c)``: one backward pass."""

    __slots__ = ("_held", "_rows", "_sums")

    def __init__(
        self,
        rows: Callable[[int, int], Tensor],
        sums: Callable[[Tensor], Tensor],
        n: int,
        value: Tensor,
        held: list[Tensor],
    ) -> None:
        super().__init__(n, value.shape, value.dtype, value.device)
        self._rows, self._sums, self._held = rows, sums, held

    def tensors(self) -> list[Tensor]:
        """Saved arguments and output gradients."""
        return self._held

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Masked backward passes."""
        last = self.n if last is None else last
        if last <= first:
            return torch.zeros((0, *self.shape), dtype=self.dtype, device=self.device)
        return self._rows(first, last)

    def narrowed(self, first: int, last: int) -> Dense:
        """Written out."""
        return Dense(self.dense(first, last))

    def without(self, bad: Tensor) -> Form:
        """Zeros in the rows: a backward pass would carry what is not finite to others."""
        return Masked(self, bad)

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """One backward pass with scaled output gradients, which rounds otherwise than rows."""
        if certain:
            return super().weighted_sum(c)
        if self.n == 0:
            return torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        return self._sums(c).to(wide(self.dtype))
