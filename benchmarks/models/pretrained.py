"""Architectures of Hugging Face transformers, randomly initialised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, classify, model, predict


def tiny_gpt2(n: int = 8, t: int = 32) -> Case:
    """Hugging Face GPT-2 with two layers of 64: little arithmetic, so that overhead shows."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    net = Logits(GPT2LMHeadModel(config))
    return net, torch.randint(256, (n, t)), torch.randint(256, (n, t)), predict


class Logits(nn.Module):
    """A Hugging Face model that returns its logits.

    ``batched`` gives every sample its own position ids, as libraries that see modules only need it.
    """

    batched = False

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Logits only."""
        given: dict[str, Tensor] = {}
        if self.batched:
            given["position_ids"] = torch.arange(x.shape[1]).repeat(len(x), 1)
        out: Any = self.inner(input_ids=x, **given)
        return out.logits


@model
def bert() -> Case:
    """Hugging Face BERT, two layers of 128."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    net = Logits(BertForSequenceClassification(config))
    return net, torch.randint(30522, (16, 128)), torch.randint(2, (16,)), classify


@model
def gpt2_small() -> Case:
    """Hugging Face GPT-2 small at its real size, four sequences of 128."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    net = Logits(GPT2LMHeadModel(config))
    return net, torch.randint(50257, (4, 128)), torch.randint(50257, (4, 128)), predict


@model
def llama() -> Case:
    """Hugging Face Llama, four layers of 256 with grouped queries, eight sequences of 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    net = Logits(LlamaForCausalLM(config))
    return net, torch.randint(8192, (8, 128)), torch.randint(8192, (8, 128)), predict
