"""Attacks by what custom functions save, where saving goes through hooks: checkpoints, offloading.

What such hooks give back is another tensor than the one that was saved. One function keeps samples
apart in backward by what it saved; the others scale gradients by something of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from .base import EITHER, EXACT, REFUSED, Case, N, case, lin, rand

Saves = Callable[[Tensor], Tensor]
Uses = Callable[[Tensor], Tensor]


def function(saves: Saves, uses: Uses = lambda saved: saved) -> Callable[[Tensor], Tensor]:
    """The identity, with a gradient scaled by what was saved."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(saves(x))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (saved,) = ctx.saved_tensors
            return grad * uses(saved)

    return Scaled.apply


FUNCTIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "its input": (EXACT, function(lambda x: x, torch.cos)),
    "something of its input": (EXACT, function(torch.sigmoid)),
    "a mean of its input": (REFUSED, function(lambda x: x, lambda saved: saved.mean(0))),
    "the mean of its input": (REFUSED, function(lambda x: x.abs().mean())),
    "other samples": (REFUSED, function(lambda x: x.roll(1, 0))),
    "its input transposed": (REFUSED, function(lambda x: x.T.contiguous())),
}


def again(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A checkpoint."""
    return checkpoint(run, x, use_reentrant=False)


def offloaded(m: nn.Module, x: Tensor, apply: Any) -> Tensor:
    """Saved tensors are copied, and copied back."""
    with save_on_cpu():
        return m.k(apply(m.l(x)))


PLACES: dict[str, Callable[[nn.Module, Tensor, Any], Tensor]] = {
    "plain": lambda m, x, apply: m.k(apply(m.l(x))),
    "checkpoint": lambda m, x, apply: again(lambda h: m.k(apply(m.l(h))), m.l(x)),
    "checkpoint of its input": lambda m, x, apply: again(lambda h: m.k(apply(h)), m.l(x)),
    "checkpoint alone": lambda m, x, apply: m.k(again(apply, m.l(x))),
    "two checkpoints": lambda m, x, apply: again(
        lambda z: again(lambda h: m.k(apply(h)), m.l(z)), m.l(x)
    ),
    "offloaded": offloaded,
}


def cases() -> Iterator[Case]:
    """Every function at every place."""
    for name, (expectation, apply) in FUNCTIONS.items():
        for place, run in PLACES.items():
            body = lambda m, x, run=run, apply=apply: run(m, x, apply)
            deep = place == "two checkpoints" and expectation == EXACT
            allowed = EITHER if deep else expectation
            parts = {"l": lin(), "k": lin(seed=3)}
            yield case(f"saved: {name}, {place}", allowed, body, rand(N, N), **parts)
