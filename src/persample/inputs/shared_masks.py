"""Arguments of torch's own modules that all samples share, whatever their size."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

# a mask of two axes is (target, source); one for each sample has three
_MASKS: dict[type[nn.Module], frozenset[str]] = {
    nn.MultiheadAttention: frozenset(("attn_mask",)),
    nn.TransformerEncoder: frozenset(("mask",)),
    nn.TransformerEncoderLayer: frozenset(("src_mask",)),
    nn.TransformerDecoder: frozenset(("tgt_mask", "memory_mask")),
    nn.TransformerDecoderLayer: frozenset(("tgt_mask", "memory_mask")),
    nn.Transformer: frozenset(("src_mask", "tgt_mask", "memory_mask")),
}


def shared_mask(module: nn.Module, name: str, value: Any) -> bool:
    """Whether an argument is an attention mask of positions, one for all samples."""
    names = _MASKS.get(type(module))
    return names is not None and name in names and isinstance(value, Tensor) and value.dim() == 2
