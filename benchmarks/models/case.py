"""What a benchmark model is: (model, inputs, targets, per-sample loss), and its registry."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

Case = tuple[nn.Module, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]
MODELS: dict[str, Callable[[], Case]] = {}


def model(build: Callable[[], Case]) -> Callable[[], Case]:
    """Register a model under its function's name."""
    if build.__name__ in MODELS:
        raise ValueError(f"two models are called {build.__name__}")
    MODELS[build.__name__] = build
    return build


def classify(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of every sample."""
    return F.cross_entropy(logits, y, reduction="none")


def predict(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of every sequence."""
    n, t, v = logits.shape
    each = F.cross_entropy(logits.reshape(n * t, v), y.reshape(n * t), reduction="none")
    return each.view(n, t).mean(1)
