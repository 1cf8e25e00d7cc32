"""Small models: registry, perceptrons, tables, convolutions, spikes.

Little arithmetic, so that what recording costs in Python shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, classify

SMALL: dict[str, Callable[[], Case]] = {}


def small(build: Callable[[], Case]) -> Callable[[], Case]:
    """Register a small model under its function's name."""
    if build.__name__ in SMALL:
        raise ValueError(f"two small models are called {build.__name__}")
    SMALL[build.__name__] = build
    return build


def images(net: nn.Module, n: int = 16, channels: int = 1, side: int = 16) -> Case:
    """Square images of ten classes."""
    return net, torch.randn(n, channels, side, side), torch.randint(10, (n,)), classify


def rows(net: nn.Module, n: int = 64, width: int = 16, classes: int = 3) -> Case:
    """Rows of a table."""
    return net, torch.randn(n, width), torch.randint(classes, (n,)), classify


def squares(out: Tensor, y: Tensor) -> Tensor:
    """Squared error of every sample."""
    return (out - y).square().flatten(1).sum(1)


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """A residual connection."""
        out: Tensor = x + self.inner(x)
        return out


@small
def linear_stack() -> Case:
    """Forty layers of four: nothing but calls."""
    layers = [layer for _ in range(40) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return rows(nn.Sequential(*layers), 8, 4, 4)


@small
def tabular_mlp() -> Case:
    """Three layers with dropout switched off by evaluation mode."""
    net = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, 3),
    )  # fmt: skip
    return rows(net.eval())


@small
def tabular_resnet() -> Case:
    """Pre-norm residual blocks."""
    blocks = [
        Residual(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        for _ in range(4)
    ]
    return rows(nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 3)))


class Gated(nn.Module):
    """Feature masks and gated linear units, step by step."""

    def __init__(self, width: int = 16, hidden: int = 16, steps: int = 3) -> None:
        super().__init__()
        self.masks = nn.ModuleList(nn.Linear(hidden, width) for _ in range(steps))
        self.units = nn.ModuleList(nn.Linear(width, 2 * hidden) for _ in range(steps))
        self.first, self.head = nn.Linear(width, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Decisions added up."""
        state, total = self.first(x), torch.zeros_like(self.first(x))
        for mask, unit in zip(self.masks, self.units, strict=True):
            state = F.glu(unit(x * mask(state).softmax(1)), 1)
            total = total + state.relu()
        out: Tensor = self.head(total)
        return out


@small
def tabular_gates() -> Case:
    """Attentive feature masks."""
    return rows(Gated())


class FactorizationMachine(nn.Module):
    """Linear terms and inner products of embedded fields."""

    def __init__(self, fields: int = 10, values: int = 200, d: int = 8) -> None:
        super().__init__()
        self.linear, self.table = nn.Embedding(values, 1), nn.Embedding(values, d)
        self.deep = nn.Sequential(nn.Linear(fields * d, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        """One score."""
        v = self.table(x)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1, keepdim=True)
        out: Tensor = self.linear(x).sum(1) + pairs + self.deep(v.flatten(1))
        return out


@small
def factorization_machine() -> Case:
    """Click prediction from categories."""
    return FactorizationMachine(), torch.randint(200, (64, 10)), torch.randn(64, 1), squares


@small
def autoencoder() -> Case:
    """Down to four numbers and up again."""
    net = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4), nn.ReLU(), nn.Linear(4, 32), nn.ReLU(),
        nn.Linear(32, 16),
    )  # fmt: skip
    x = torch.randn(64, 16)
    return net, x, x.clone(), squares


@small
def lenet() -> Case:
    """Two convolutions, three layers."""
    net = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    return images(net)


@small
def tiny_resnet() -> Case:
    """Residual convolutions with GroupNorm."""
    blocks = [
        Residual(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()) for _ in range(4)
    ]
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 10),
    )  # fmt: skip
    return images(net, channels=3, side=8)


@small
def separable() -> Case:
    """Depthwise and pointwise convolutions."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for i, o in ((8, 16), (16, 16), (16, 32)):
        layers += [nn.Conv2d(i, i, 3, padding=1, groups=i), nn.Conv2d(i, o, 1), nn.ReLU6()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return images(net, channels=3, side=8)


@small
def dilated_sequence() -> Case:
    """Causal dilated convolutions over time."""
    layers: list[nn.Module] = []
    for k in range(4):
        pad = 2 << k
        layers += [nn.ConstantPad1d((pad, 0), 0.0), nn.Conv1d(8, 8, 3, dilation=1 << k), nn.ReLU()]
    net = nn.Sequential(nn.Conv1d(2, 8, 1), *layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(),
                        nn.Linear(8, 10))  # fmt: skip
    return net, torch.randn(16, 2, 32), torch.randint(10, (16,)), classify


class UNet(nn.Module):
    """Down, up, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """An image of the same size."""
        high = self.first(x).relu()
        out: Tensor = self.last(torch.cat([high, self.up(self.down(high).relu())], 1))
        return out


@small
def tiny_unet() -> Case:
    """A denoiser of small images."""
    x = torch.randn(8, 1, 16, 16)
    return UNet(), x, torch.randn_like(x), squares


class Spike(torch.autograd.Function):
    """A threshold with a smooth derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """One above zero."""
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Of a fast sigmoid."""
        (x,) = ctx.saved_tensors
        return grads[0] / (1 + 10 * x.abs()).square()


class Spiking(nn.Module):
    """Leaky integrate-and-fire neurons between layers, over several time steps."""

    def __init__(self, layers: list[nn.Module], steps: int = 5) -> None:
        super().__init__()
        self.layers, self.steps = nn.ModuleList(layers), steps

    def forward(self, x: Tensor) -> Tensor:
        """Spikes of the last layer, counted."""
        potentials: list[Tensor | None] = [None] * len(self.layers)
        total: Tensor | None = None
        for _ in range(self.steps):
            h = x
            for k, layer in enumerate(self.layers):
                charge, old = layer(h), potentials[k]
                charge = charge if old is None else 0.9 * old + charge
                h = Spike.apply(charge - 1.0)
                potentials[k] = charge - h
            total = charge if total is None else total + charge
        assert total is not None
        return total


@small
def spiking_mlp() -> Case:
    """Two spiking layers, five steps."""
    return rows(Spiking([nn.Linear(16, 32), nn.Linear(32, 3)]))


@small
def spiking_convolutions() -> Case:
    """Convolutions that spike."""
    read = nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 10))
    return images(Spiking([nn.Conv2d(1, 8, 3, 2, 1), read]))
