"""Perceptron, convolutions, ResNet-18 and a vision transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .case import Case, classify, model


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


class BatchedVisionTransformer(nn.Module):
    """The same, with token and positions as embeddings looked up once per sample.

    Libraries that see modules only cannot serve parameters used outside of a layer; this is what
    their users write instead.
    """

    def __init__(self, original: VisionTransformer) -> None:
        super().__init__()
        self.patch, self.blocks = original.patch, original.blocks
        self.norm, self.head = original.norm, original.head
        self.token = nn.Embedding(1, original.token.shape[-1])
        self.positions = nn.Embedding(*original.positions.shape[1:])
        with torch.no_grad():
            self.token.weight.copy_(original.token[0])
            self.positions.weight.copy_(original.positions[0])

    def forward(self, x: Tensor) -> Tensor:
        """Class scores from the class token."""
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token(torch.zeros(len(x), 1, dtype=torch.long)), h], 1)
        h = h + self.positions(torch.arange(h.shape[1]).repeat(len(x), 1))
        return self.head(self.norm(self.blocks(h))[:, 0])


@model
def vit() -> Case:
    """A small vision transformer, 32 images."""
    return VisionTransformer(), torch.randn(32, 3, 32, 32), torch.randint(100, (32,)), classify
