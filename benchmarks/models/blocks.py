"""Transformer blocks that the vision and language models share."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Fused projections and scaled dot-product attention."""

    def __init__(self, d: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, d) to (n, t, d)."""
        n, t, d = x.shape
        q, k, v = (
            part.reshape(n, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(n, t, d))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, d: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(d), Attention(d, heads, causal)
        self.norm2 = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the two-layer perceptron."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))
