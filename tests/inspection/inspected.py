"""Small data sets and training steps for the tests of ``persample.inspect``."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample

Batches = list[tuple[Tensor, Tensor]]


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def blobs(n: int = 60, size: int = 16, dtype: torch.dtype = torch.float32) -> Batches:
    """Three separated clouds."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    x = torch.randn(n, 6, generator=generator, dtype=dtype) * 0.4
    x[torch.arange(n), y] += 2
    return list(zip(x.split(size), y.split(size), strict=True))


def trained(batches: Batches, steps: int = 200) -> nn.Module:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        losses(model, batches[step % len(batches)]).mean().backward()
        optimizer.step()
    model.zero_grad()
    return model


def report(batches: Batches | None = None, **options: Any) -> persample.Report:
    options = {"progress": False, "width": 32} | options
    return persample.inspect(net(), losses, blobs() if batches is None else batches, **options)


# ------------------------------------------------------------------ for the command line


def step() -> Any:
    return net(), losses, blobs()


def with_ids() -> Any:
    named = [(x, y, [f"<b>{i}&" for i in range(len(y))]) for x, y in blobs()]
    show = persample.Show(classes=["red", "green", "<i>blue"])
    return net(), losses, named, {"ids": 2, "show": show}


def scalar() -> Any:
    return net(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), blobs()


def nothing() -> Any:
    return net(), losses, []


def late() -> Any:
    """The third batch is refused."""

    def refusing(model: nn.Module, batch: Any) -> Tensor:
        found = losses(model, batch)
        return found - found.mean() if len(batch) == 3 else found

    batches: list[Any] = blobs()
    batches[2] = (*batches[2], True)
    return net(), refusing, batches


def interrupted(after: int) -> Any:
    """Ctrl-C while a later batch is recorded."""
    seen = []

    def stopping(model: nn.Module, batch: Any) -> Tensor:
        if torch.overrides._get_current_function_mode_stack() and len(batch[1]) == 16:
            seen.append(batch)
            if len(seen) > after + 1:  # the self-check has smaller batches
                raise KeyboardInterrupt
        return losses(model, batch)

    return net(), stopping, blobs()


def interrupted_late() -> Any:
    return interrupted(1)


def interrupted_at_once() -> Any:
    return interrupted(-1)


def broken() -> Any:
    def failing(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, batch) + torch.ones(3)

    return net(), failing, blobs()


def raising() -> Any:
    raise RuntimeError("no data today")


def listed() -> Any:
    return net(), losses, list(blobs()[0])


def ones() -> Any:
    """Batches of one sample: isolation cannot be verified."""
    return net(), losses, blobs(n=5, size=1)


def data_set() -> Any:
    x, y = blobs()[0]
    return net(), losses, torch.utils.data.TensorDataset(x, y)


def pairs() -> Any:
    """Single samples: a tensor and a number."""
    x, y = blobs()[0]
    return net(), losses, [(row, int(label)) for row, label in zip(x, y, strict=True)]


def samples() -> Any:
    """Single samples without tensors, as a data set of Hugging Face gives them."""
    return net(), losses, [[[0.5] * 6, 1] for _ in range(5)]


def mapped() -> Any:
    """Batches in a mapping that is no dictionary."""
    batches = [UserDict(x=x, y=y) for x, y in blobs()]
    return net(), lambda model, batch: losses(model, (batch["x"], batch["y"])), batches


def shuffled() -> Any:
    """Ids in order, and a loader that shuffles."""
    x, y = blobs(n=32, size=32)[0]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8, shuffle=True)
    return net(), losses, loader, {"ids": [f"row-{i}" for i in range(32)]}
