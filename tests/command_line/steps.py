"""Training steps for the command line's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def good() -> Any:
    return nn.Linear(4, 2), _losses, torch.randn(5, 4)


def mixing() -> Any:
    return nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), _losses, torch.randn(5, 4)


def coupled() -> Any:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum(1) / float(x.abs().sum())

    return nn.Linear(4, 2), losses, torch.randn(5, 4)


def odd() -> Any:
    return nn.Linear(4, 2)
