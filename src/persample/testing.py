"""The oracle, one sample at a time, and helpers for tests of models and rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .inputs.batch_samples import batch_size, take

__all__ = ["LossFn", "batch_size", "oracle", "relative_error", "take"]

LossFn = Callable[[nn.Module, Any], Tensor]


def oracle(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    n: int | None = None,
    dim: int = 0,
    twice: bool = False,
) -> dict[str, Tensor]:
    """Per-sample gradients by running every sample alone: ``{name: (n, *shape)}``.

    >>> import torch, persample
    >>> model, x = torch.nn.Linear(3, 2).double(), torch.randn(4, 3).double()
    >>> expected = persample.testing.oracle(model, lambda m, x: m(x).square().sum(1), x)
    >>> with persample.record(model) as tape:
    ...     tape.backward(model(x).square().sum(1))
    >>> persample.testing.relative_error(tape.grads(), expected) < 1e-12
    True

    Args:
        model: Any module; its ``.grad`` ends as it was.
        loss_fn: A function of (model, batch) that returns one loss per sample.
        batch: A tensor, or tensors in containers of any kind.
        n: The number of samples; else that of the first tensor.
        dim: The axis of the samples in every tensor of the batch.
        twice: Run two copies of each sample and differentiate the first copy's loss: torch's
            eval-mode BatchNorm on the CPU has a wrong backward for some batches of one.
    """
    n = batch_size(batch, dim) if n is None else n
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    before = {name: parameter.grad for name, parameter in named.items()}
    try:
        for i in range(n):
            for parameter in named.values():
                parameter.grad = None
            index = torch.tensor([i, i] if twice else [i])
            loss_fn(model, take(batch, index, n, dim))[0].sum().backward()
            for name, parameter in named.items():
                grad = parameter.grad
                rows[name].append(torch.zeros_like(parameter) if grad is None else grad.to_dense())
    finally:
        for name, parameter in named.items():
            parameter.grad = before[name]
    return {
        name: torch.stack(r).detach() if r else named[name].new_zeros((0, *named[name].shape))
        for name, r in rows.items()
    }


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest deviation, relative to the largest entry of the expected gradients."""
    if set(found) != set(expected):
        return float("inf")
    top = max((float(e.abs().max()) for e in expected.values() if e.numel()), default=0.0)
    worst = 0.0
    for name, value in expected.items():
        if found[name].shape != value.shape:
            return float("inf")
        if value.numel():
            error = float((found[name] - value).abs().max()) / (top or 1.0)
            worst = error if not error <= worst else worst
    return worst
