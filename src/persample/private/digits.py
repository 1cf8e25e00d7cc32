"""The demonstration's data and model: scikit-learn's digits, and a small network."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UsageError

HELD_OUT = 360
Digits = tuple[Tensor, Tensor]


class DigitNet(nn.Module):
    """Two convolutions and a linear layer; group norm, where others would take batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2)
        self.norm1, self.norm2 = nn.GroupNorm(4, 16), nn.GroupNorm(8, 32)
        self.head = nn.Linear(288, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 1, 8, 8) to (n, 10)."""
        x = F.relu(self.norm1(self.conv1(x)))
        scores: Tensor = self.head(F.relu(self.norm2(self.conv2(x))).flatten(1))
        return scores


def losses(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Cross-entropy of every digit."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def digits() -> tuple[Digits, Digits]:
    """Images and labels, for training and held out."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise UsageError(
            "the demonstration needs scikit-learn, which has the digits",
            fix='pip install "persample[demo,private]", or your own: persample private train:step',
        ) from error
    found = datasets.load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(found.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held, kept = order[:HELD_OUT], order[HELD_OUT:]
    return (x[kept], y[kept]), (x[held], y[held])


def accuracy(model: nn.Module, data: Digits) -> float:
    """The share of right digits."""
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        right = model(data[0].to(device)).argmax(1).eq(data[1].to(device))
    return float(right.double().mean())
