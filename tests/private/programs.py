"""A small private training, the same for every test that needs one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import private

SIZE = 40


def data(
    size: int = SIZE, width: int = 5, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Inputs, labels."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(3, (size,), generator=generator)


def net(dtype: torch.dtype = torch.float32, *, dropout: float = 0.0) -> nn.Sequential:
    """Two layers, the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)]
        return nn.Sequential(*layers).to(dtype)


def losses(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of every sample."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def planned(**changes: Any) -> private.Plan:
    """Six steps of about ten samples."""
    known = {
        "noise_multiplier": 1.0, "delta": 1e-3, "size": SIZE, "batch_size": 10, "steps": 6,
    }  # fmt: skip
    return private.plan(**known | changes)


def seeded(number: int) -> torch.Generator:
    """A generator for tests."""
    return torch.Generator().manual_seed(number)


def training(
    model: nn.Module | None = None,
    given: Any = None,
    plan: private.Plan | None = None,
    kind: type[private.Training] = private.Training,
    lr: float = 0.1,
    **options: Any,
) -> private.Training:
    """Draws and noise are the same every time, unless told otherwise."""
    model = net() if model is None else model
    known: dict[str, Any] = {
        "loss_fn": losses,
        "micro_batch": 7,
        "noise_generator": seeded(1),
        "sample_generator": seeded(2),
        "verify": False,
    }
    return kind(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, momentum=0.9),
        data() if given is None else given,
        planned() if plan is None else plan,
        **known | options,
    )


def parameters(model: nn.Module) -> list[Tensor]:
    """Copies."""
    return [p.detach().clone() for p in model.parameters()]


def finish(made: private.Training) -> list[Tensor]:
    """All steps that are left, in the short form."""
    for _ in made:
        pass
    return parameters(made.model)
