"""Transformers with low-rank adapters, with gradient checkpointing, and with experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .blocks import Attention
from .case import Case, model, predict
from .language import LanguageModel


class LowRank(nn.Module):
    """A frozen linear layer with a trained correction of rank ``rank``."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """W x + B A x."""
        return self.frozen(x) + self.up(self.down(x))


class Checkpointed(nn.Module):
    """A block whose activations are computed again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


def adapted(checkpointed: bool, n: int = 8, t: int = 128, v: int = 8192) -> Case:
    """The language model of four blocks of 256, adapters on attention, everything else frozen."""
    net = LanguageModel(v, 256, 4, 4, t, tied=False).requires_grad_(False)
    blocks: Any = net.blocks
    for block in blocks:
        block.attention.qkv = LowRank(block.attention.qkv)
        block.attention.out = LowRank(block.attention.out)
    if checkpointed:
        net.blocks = nn.Sequential(*[Checkpointed(block) for block in blocks])
    return net, torch.randint(v, (n, t)), torch.randint(v, (n, t)), predict


@model
def lora() -> Case:
    """Rank 8 on the attention projections."""
    return adapted(False)


@model
def lora_checkpointed() -> Case:
    """The same with gradient checkpointing of every block."""
    return adapted(True)


class Experts(nn.Module):
    """Each position is sent to two of eight small perceptrons."""

    def __init__(self, d: int, width: int, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        self.gate, self.chosen = nn.Linear(d, experts, bias=False), chosen
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, width), nn.GELU(), nn.Linear(width, d))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, d) to (n, t, d)."""
        h = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(h).softmax(-1).topk(self.chosen, -1)
        out = torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == index)
            out.index_add_(0, rows, expert(h[rows]) * weights[rows, slots, None])
        return out.view_as(x)


class ExpertBlock(nn.Module):
    """A pre-norm block with experts in the place of its perceptron."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(d), Attention(d, heads, causal=True)
        self.norm2, self.experts = nn.LayerNorm(d), Experts(d, 2 * d)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the experts."""
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x))


@model
def experts() -> Case:
    """A language model with a mixture of experts: top two of eight, four blocks of 256."""
    net = LanguageModel(4096, 256, 4, 4, 128, tied=False)
    net.blocks = nn.Sequential(*[ExpertBlock(256, 4) for _ in range(4)])
    return net, torch.randint(4096, (8, 128)), torch.randint(4096, (8, 128)), predict
