"""Language models and text classifiers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .case import Case, classify, model, predict


class LanguageModel(nn.Module):
    """A GPT-like decoder; ``tied`` shares embedding and head.

    ``batched`` looks positions up once per sample, as libraries that see modules only need it.
    """

    batched = False

    def __init__(self, v: int, d: int, depth: int, heads: int, t: int, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(v, d), nn.Embedding(t, d)
        self.blocks = nn.Sequential(*[Block(d, heads, True) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, v, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """(n, t) to (n, t, v)."""
        places = torch.arange(x.shape[1], device=x.device)
        if self.batched:
            places = places.repeat(len(x), 1)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(places))))


def language(tied: bool, n: int = 8, t: int = 128, v: int = 8192) -> Case:
    """A language model of 4 blocks of 256."""
    net = LanguageModel(v, 256, 4, 4, t, tied)
    return net, torch.randint(v, (n, t)), torch.randint(v, (n, t)), predict


@model
def gpt() -> Case:
    """Untied."""
    return language(False)


@model
def gpt_tied() -> Case:
    """Embedding and head share their weight."""
    return language(True)


class LSTMClassifier(nn.Module):
    """Embedding, one LSTM layer, last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, 128)
        self.lstm = nn.LSTM(128, 128, batch_first=True)
        self.head = nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t) to (n, 2)."""
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


@model
def lstm() -> Case:
    """An LSTM text classifier."""
    return LSTMClassifier(), torch.randint(8000, (32, 64)), torch.randint(2, (32,)), classify


class BagOfWords(nn.Module):
    """Mean of embeddings of a large vocabulary, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50000, 64)
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t) to (n, 4)."""
        return self.head(F.relu(self.hidden(self.embedding(x).mean(1))))


@model
def text() -> Case:
    """A text classifier with 50,000 words."""
    return BagOfWords(), torch.randint(50000, (64, 64)), torch.randint(4, (64,)), classify


@model
def tiny() -> Case:
    """Two small layers, for tests of the benchmark itself."""
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    return net, torch.randn(5, 8), torch.randint(3, (5,)), classify
