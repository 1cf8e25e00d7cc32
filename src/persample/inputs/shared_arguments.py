"""Arguments of modules that all samples share, whatever their size: masks and positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..uses import Positions

# a mask of two axes is (target, source); one for each sample has three
_MASKS: dict[type[nn.Module], frozenset[str]] = {
    nn.MultiheadAttention: frozenset(("attn_mask",)),
    nn.TransformerEncoder: frozenset(("mask",)),
    nn.TransformerEncoderLayer: frozenset(("src_mask",)),
    nn.TransformerDecoder: frozenset(("tgt_mask", "memory_mask")),
    nn.TransformerDecoderLayer: frozenset(("tgt_mask", "memory_mask")),
    nn.Transformer: frozenset(("src_mask", "tgt_mask", "memory_mask")),
}


def shared(module: nn.Module, name: str, value: Any, positions: Positions) -> bool:
    """Whether an argument beside samples is the same for all of them."""
    if not isinstance(value, Tensor) or value.requires_grad:
        return False
    mask = value.dim() == 2 and name in _MASKS.get(type(module), ())
    return mask or positions.holds(value)
