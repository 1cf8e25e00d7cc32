"""Every model of the benchmark by name."""

from __future__ import annotations

from . import adapted, language, pretrained, vision
from .case import MODELS, Case

__all__ = ["ALL", "MODELS", "QUICK", "Case", "adapted", "language", "pretrained", "vision"]

ALL = [
    "mlp", "cnn", "resnet18", "vit", "gpt", "gpt_tied", "bert", "gpt2_small", "llama", "lstm",
    "text", "lora", "lora_checkpointed", "experts",
]  # fmt: skip
QUICK = ["cnn", "bert"]
