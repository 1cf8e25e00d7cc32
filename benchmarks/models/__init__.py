"""Every model of the benchmark by name."""

from __future__ import annotations

from . import adapted, language, pretrained, small_sequences, vision
from .case import MODELS, Case
from .small import SMALL

__all__ = [
    "ALL", "MODELS", "QUICK", "SMALL", "Case", "adapted", "language", "pretrained",
    "small_sequences", "vision",
]  # fmt: skip

ALL = [
    "mlp", "cnn", "resnet18", "vit", "gpt", "gpt_tied", "bert", "gpt2_small", "llama", "lstm",
    "text", "lora", "lora_checkpointed", "experts",
]  # fmt: skip
QUICK = ["cnn", "bert"]
