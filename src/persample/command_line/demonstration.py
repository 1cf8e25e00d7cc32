"""The demonstration: scikit-learn's digits with some labels changed on purpose."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UsageError
from ..inspection import Report, Show
from .target import Target

WRONG = 90
BATCH = 64


class DigitNet(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2)
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(288, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 1, 8, 8) to (n, 10)."""
        x = F.relu(self.norm(self.conv1(x)))
        scores: Tensor = self.head(F.relu(self.conv2(x)).flatten(1))
        return scores


def losses(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Cross-entropy of every digit."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels of which 5 % are wrong, and the positions of the wrong ones."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise UsageError(
            "the demonstration needs scikit-learn, which provides the digits",
            fix='pip install "persample[demo]", or inspect your own: persample inspect train:step',
        ) from error
    found = datasets.load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(found.target)
    generator = torch.Generator().manual_seed(0)
    wrong = torch.randperm(len(y), generator=generator)[:WRONG]
    y[wrong] = (y[wrong] + 1 + torch.randint(9, (WRONG,), generator=generator)) % 10
    return x, y, wrong


def demonstration(epochs: int = 60) -> tuple[Target, Tensor]:
    """A network that has learned the digits and the wrong labels; positions of the wrong ones."""
    x, y, wrong = digits()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DigitNet()
        optimizer = torch.optim.Adam(model.parameters(), 2e-3)
        for _ in range(epochs):
            for part in torch.randperm(len(y)).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(x[part]), y[part]).backward()
                optimizer.step()
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    options: dict[str, Any] = {
        "ids": [f"digit-{i}" for i in range(len(y))],
        "show": Show(images=lambda batch: batch[0]),
    }
    return Target(model.eval(), losses, batches, options), wrong


def mark(report: Report, wrong: Tensor) -> None:
    """Tell the report which labels are wrong, as far as the pass has seen them."""
    seen = [i for i in wrong.tolist() if i < report.count]
    report.mark_planted(f"digit-{i}" for i in seen)


def explanation(report: Report) -> str:
    """What the demonstration did, and what to try next."""
    assert report.planted is not None
    assert report.predictions is not None
    assert report.labels is not None
    right = float(report.predictions.eq(report.labels).double().mean())
    return (
        f"{len(report.planted.positions)} labels were changed on purpose before training. The "
        f"network has memorised them: it agrees with {right:.1%} of the labels, so most wrong "
        "labels have a small loss.\nOn your own data: persample inspect train:step --html "
        "report.html (persample inspect --help shows train.py)"
    )


def announce() -> None:
    """Say what is going on during the training."""
    print(
        f"Training a small network on 1,797 digits, {WRONG} of them with a wrong label …",
        file=sys.stderr,
        flush=True,
    )
