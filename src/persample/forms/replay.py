"""The gradients of an operator without a rule: computed by its own backward when asked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .dense import Dense
from .form import Form, wide


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

    def nbytes(self) -> int:
        """Bytes of what the replay needs."""
        return sum(t.numel() * t.element_size() for t in self._held)

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
        """Written out with zeros: a backward pass over non-finite data would spread them."""
        keep = ~bad.view(-1, *[1] * len(self.shape))
        rows = self._rows

        def kept(first: int, last: int) -> Tensor:
            found = rows(first, last)
            return torch.where(keep[first:last], found, torch.zeros_like(found))

        def added(c: Tensor) -> Tensor:
            return Form.weighted_sum(form, c)

        form = Replay(kept, added, self.n, torch.empty(0), self._held)
        form.shape, form.dtype, form.device = self.shape, self.dtype, self.device
        return form

    def certain_sum(self, c: Tensor) -> Tensor:
        """From the rows: a backward pass over all samples at once would round differently."""
        return Form.weighted_sum(self, c)

    def weighted_sum(self, c: Tensor) -> Tensor:
        """One backward pass with scaled output gradients."""
        if self.n == 0:
            return torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        return self._sums(c).to(wide(self.dtype))
