"""Forms that answer for several tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..form import Form


class Joined(Form):
    """Gradients of several tensors, asked together; ``names`` are theirs."""

    __slots__ = ("names",)

    def __init__(self, n: int, names: Sequence[str], like: Tensor) -> None:
        super().__init__(n, torch.Size(), like.dtype, like.device)
        self.names = names

    def sums(self, c: Tensor) -> dict[str, Tensor]:
        """Σᵢ cᵢ gᵢ of every tensor."""
        raise NotImplementedError
