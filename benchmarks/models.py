"""The models of the benchmark: each returns (model, inputs, targets, per-sample loss)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Case = tuple[nn.Module, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]
MODELS: dict[str, Callable[[], Case]] = {}


def model(build: Callable[[], Case]) -> Callable[[], Case]:
    """Register a model under its function's name."""
    MODELS[build.__name__] = build
    return build


def classify(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of every sample."""
    return F.cross_entropy(logits, y, reduction="none")


def predict(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of every sequence."""
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)


@model
def mlp() -> Case:
    """Three wide layers, 256 samples."""
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 10),
    )  # fmt: skip
    return net, torch.randn(256, 784), torch.randint(10, (256,)), classify


@model
def cnn() -> Case:
    """Four convolutions with average pooling on 32×32 images."""
    layers: list[nn.Module] = []
    for i, o in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    layers += [nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(128, 10))
    return net, torch.randn(64, 3, 32, 32), torch.randint(10, (64,)), classify


class Residual(nn.Module):
    """Two 3×3 convolutions with GroupNorm and a shortcut."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, o)
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(32, o)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or i != o:
            self.shortcut = nn.Sequential(
                nn.Conv2d(i, o, 1, stride, bias=False), nn.GroupNorm(32, o)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The usual block."""
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


@model
def resnet18() -> Case:
    """ResNet-18 for 32×32 images, GroupNorm."""
    blocks: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()
    ]  # fmt: skip
    width = 64
    for o, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        blocks.append(Residual(width, o, stride))
        width = o
    net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return net, torch.randn(32, 3, 32, 32), torch.randint(10, (32,)), classify


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


class VisionTransformer(nn.Module):
    """Patches of 4, a class token and positions as parameters."""

    def __init__(self, d: int = 192, depth: int = 6, heads: int = 3, classes: int = 100) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, d, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, d) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 65, d) * 0.02)
        self.blocks = nn.Sequential(*[Block(d, heads, False) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores from the class token."""
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), h], 1) + self.positions
        return self.head(self.norm(self.blocks(h))[:, 0])


@model
def vit() -> Case:
    """A small vision transformer, 32 images."""
    return VisionTransformer(), torch.randn(32, 3, 32, 32), torch.randint(100, (32,)), classify


class LanguageModel(nn.Module):
    """A GPT-like decoder; ``tied`` shares embedding and head."""

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
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


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


class Logits(nn.Module):
    """A Hugging Face model that returns its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Logits only."""
        out: Any = self.inner(input_ids=x)
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
def gpt2_small() -> Case:
    """Hugging Face GPT-2 small at its real size, four sequences of 128."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    net = Logits(GPT2LMHeadModel(config))
    return net, torch.randint(50257, (4, 128)), torch.randint(50257, (4, 128)), predict
