"""The gradients written out."""

from __future__ import annotations

from torch import Tensor


class Dense:
    """gᵢ is row i of a tensor (n, *shape)."""

    __slots__ = ("rows",)

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def dense(self) -> Tensor:
        """(n, *shape)."""
        return self.rows
