"""One run of a row: the whole batch, or one sample at a time, natively and in two steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .subject import Row, Subject

STEPS, RATE = 2, 0.01
TOO_LARGE = 6_000_000
Grads = dict[str, Tensor]


class Skip(Exception):
    """This row cannot be judged."""


def seed(number: int) -> None:
    """Every generator a model may draw from."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def fresh(row: Row, dtype: torch.dtype, training: bool) -> Subject:
    """The same model and data every time."""
    seed(0)
    subject = row.build()
    size = sum(p.numel() for p in subject.model.parameters())
    if size > TOO_LARGE:
        raise Skip(f"{size:,} parameters")
    subject.model._apply(lambda tensor: widened(tensor, dtype))
    subject.model.train(training)
    return subject


def widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating numbers in ``dtype``, complex numbers of two such."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """A copy of the batch, its floating tensors in ``dtype``."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(dtype, copy=True) if leaf.is_floating_point() else leaf.clone()

    return tree_map(convert, batch)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def losses_of(subject: Subject, batch: Any, step: int) -> Tensor:
    seed(step + 1)
    return subject.loss(subject.model, batch)


def descend(model: nn.Module, grads: Grads) -> None:
    """One step of gradient descent."""
    with torch.no_grad():
        for name, p in trained(model).items():
            p.sub_(RATE * grads[name].reshape(p.shape))


def rows_of(losses: Tensor, model: nn.Module, samples: Sequence[int]) -> Grads:
    """The gradient of each of these losses, by a plain backward: some layers call it themselves."""
    named = trained(model)
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for i in samples:
        losses[i].backward(retain_graph=True)
        for name, p in named.items():
            rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone())
            p.grad = None
    return {name: torch.stack(r).detach() for name, r in rows.items()}


def sums(rows: Grads) -> Grads:
    return {name: g.sum(0) for name, g in rows.items()}


def natively(
    row: Row, dtype: torch.dtype, training: bool
) -> tuple[list[Grads], list[dict[str, Tensor]]]:
    """The gradient of each loss of the whole batch, and the model after it, in each step."""
    subject = fresh(row, dtype, training)
    found, after = [], []
    for step in range(STEPS):
        losses = losses_of(subject, cast(subject.batch, dtype), step)
        if losses.shape != (subject.n,):
            raise Skip(f"losses of shape {tuple(losses.shape)}")
        found.append(rows_of(losses, subject.model, range(subject.n)))
        if not all(g.isfinite().all() for g in found[-1].values()):
            raise Skip("gradients are not finite")
        descend(subject.model, sums(found[-1]))
        after.append({k: v.detach().clone() for k, v in state_of(subject.model).items()})
    if not any(g.any() for grads in found for g in grads.values()):
        raise Skip("gradients are zero")
    return found, after


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def follow(model: nn.Module, after: dict[str, Tensor]) -> None:
    """Parameters and buffers as the whole batch left them; state of single samples stays."""
    with torch.no_grad():
        for name, tensor in state_of(model).items():
            if name in after and after[name].shape == tensor.shape:
                tensor.copy_(after[name])


def one_by_one(
    row: Row, dtype: torch.dtype, training: bool, after: list[dict[str, Tensor]], *, copies: bool
) -> list[Grads]:
    """The same from batches of one sample, or of ``n`` copies of it; a model for each sample."""
    rows: list[list[Grads]] = [[] for _ in range(STEPS)]
    n = fresh(row, dtype, training).n
    for i in range(n):
        subject = fresh(row, dtype, training)
        batch = subject.chosen([i] * n if copies else [i])
        place = i if copies else 0
        for step in range(STEPS):
            losses = losses_of(subject, cast(batch, dtype), step)
            rows[step].append(rows_of(losses, subject.model, [place]))
            follow(subject.model, after[step])
    return [{name: torch.cat([g[name] for g in each]) for name in each[0]} for each in rows]


class Narrow(TorchFunctionMode):
    """Notices differentiable results that are narrower than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.seen = self.seen or leaf.dtype not in (torch.float64, torch.complex128)
        return out


def narrow(row: Row, training: bool) -> bool:
    """Whether the model computes with less than float64 although it was cast to it."""
    subject = fresh(row, torch.float64, training)
    with Narrow() as noticed:
        losses_of(subject, cast(subject.batch, torch.float64), 0)
    return noticed.seen


def varies(row: Row, dtype: torch.dtype, training: bool) -> bool:
    """Whether the losses depend on random numbers."""
    found = []
    for number in (1, 2):
        subject = fresh(row, dtype, training)
        seed(number)
        found.append(subject.loss(subject.model, cast(subject.batch, dtype)).detach())
    return not torch.allclose(found[0], found[1], equal_nan=True)
