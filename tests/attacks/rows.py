"""What the scripts share: native rows, recorded rows, a small model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import persample

from .base import N, Net, Rows, dense, lin, rand, trainable

Pair = tuple[Rows, Rows]
X, Y = rand(N, N), rand(N, N, seed=3)
CUBE = rand(N, N, N)


def native(model: nn.Module, losses: Tensor) -> Rows:
    """Row i is the gradient of losses[i]."""
    named = trainable(model)
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for loss in losses:
        model.zero_grad()
        loss.sum().backward(retain_graph=True)
        for name, parameter in named.items():
            rows[name].append(dense(parameter))
    model.zero_grad()
    return {name: torch.stack(r) for name, r in rows.items()}


def found(model: nn.Module, losses_of: Callable[[], Tensor], **options: Any) -> Rows:
    """What persample answers."""
    with persample.record(model, **options) as tape:
        tape.backward(losses_of())
    return tape.grads()


def both(model: nn.Module, losses_of: Callable[[], Tensor], **options: Any) -> Pair:
    """The answer and the native rows of the same losses."""
    return found(model, losses_of, **options), native(model, losses_of())


def scaled(
    model: nn.Module, scalar_of: Callable[[], Tensor], losses_of: Callable[[], Tensor]
) -> Pair:
    """A scalar; the rows expected are those of the losses that it is the sum of."""
    return found(model, scalar_of), native(model, losses_of())


def two() -> nn.Module:
    """Two layers."""
    return Net(lambda m, x: m.k(m.l(x).tanh()), l=lin(), k=lin(seed=2))


def doubled(rows: Rows, factor: float) -> Rows:
    """All rows times a number."""
    return {k: factor * g for k, g in rows.items()}
