"""Attacks by custom functions on weights, on weights and data, and by writes past torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .base import EITHER, EXACT, REFUSED, Case, N, Table, lin, on_module, rand


def function_of(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """A custom function of one tensor."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Any:
            return forward(w)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return backward(*grads)

    return Made.apply


def enabled(w: Tensor) -> Tensor:
    """A result that has a history of its own."""
    with torch.enable_grad():
        return w * 1


def clip(g: Tensor) -> Tensor:
    """Not linear."""
    return g.clamp(-0.1, 0.1)


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda w: w,
    "view_as": lambda w: w.view_as(w),
    "view": lambda w: w.view(w.shape),
    "slice": lambda w: w[:, :],
    "contiguous": lambda w: w.contiguous(),
    "detach": lambda w: w.detach(),
    "clone": lambda w: w.clone(),
    "with gradients": enabled,
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {"reversed": lambda g: -2 * g, "clipped": clip}


def halves(w: Tensor) -> Any:
    """Two views."""
    return w.chunk(2, 1)


split = function_of(halves, lambda a, b: torch.cat([-2 * a, clip(b)], 1))
pair = function_of(lambda w: w.t(), lambda g: clip(g.t()))


def identities() -> Iterator[Case]:
    """Functions that return a weight as it is, and change its gradient."""
    for name, same in SAME.items():
        for how, change in CHANGES.items():
            f = function_of(same, change)
            table: Table = {
                "of a weight": (EXACT, lambda m, x, f=f: m.l(x) @ f(m.w)),
                "of a weight, used twice": (
                    EXACT,
                    lambda m, x, f=f: (lambda w: (x @ w).tanh() @ w)(f(m.w)),
                ),
                "of a weight, then a view": (
                    EXACT,
                    lambda m, x, f=f: m.l(x) @ f(m.w)[:, :3].t().t(),
                ),
                "of a derived weight": (EXACT, lambda m, x, f=f: m.l(x) @ f(m.w * 2)),
                "of a row of a table": (
                    EXACT,
                    lambda m, x, f=f: m.l(x) + f(nn.functional.embedding(torch.tensor([1]), m.w)),
                ),
            }
            yield from on_module(f"{how} {name}", table, rand(N, N), l=lin(), w=rand(N, N, seed=6))


class Linear(torch.autograd.Function):
    """A product with a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.first = True
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


class Remembering(Linear):
    """Its second run gives something else."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        factor, ctx.first = (1 if ctx.first else 2), False
        return factor * g @ w.T, factor * x.T @ g


class Decaying(Linear):
    """Every run adds the weight."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g + 0.1 * w


WORK = torch.zeros(N, N, dtype=torch.float64)


class Reusing(Linear):
    """Returns the same memory every time."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        torch.mm(x.T, g, out=WORK)
        return g @ w.T, WORK


class Both(torch.autograd.Function):
    """Data and weights, whose gradients it multiplies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x * 1, w * 1

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a, b + a.sum(0) * b


def shared(m: nn.Module, x: Tensor) -> Tensor:
    """A derived weight that a function and an operator use."""
    w = (m.w * m.l.bias).tanh()
    return Linear.apply(m.l(x), w).tanh() @ w


def part_hooked(m: nn.Module, x: Tensor) -> Tensor:
    """A hook on one of two parts."""
    one, other = (m.w * 1).chunk(2, 1)
    other.register_hook(clip)
    return (m.l(x) @ one) * (x @ other)


def reentrant(m: nn.Module, x: Tensor) -> Tensor:
    """A clipped weight inside and outside a checkpoint that back-propagates by itself."""
    w = function_of(lambda w: w * 1, clip)(m.w)
    return checkpoint(lambda z: (z @ w).tanh(), m.l(x), use_reentrant=True) @ w


OTHERS: Table = {
    "two views": (EXACT, lambda m, x: torch.mul(*(m.l(x) @ half for half in split(m.w)))),
    "a transpose": (EXACT, lambda m, x: m.l(x) @ pair(m.w)),
    "a shared derived weight": (EXACT, shared),
    "a state": (REFUSED, lambda m, x: Remembering.apply(m.l(x), m.w)),
    "a workspace": (EITHER, lambda m, x: Reusing.apply(m.l(x), m.w)),
    "something added in every run": (REFUSED, lambda m, x: Decaying.apply(m.l(x), m.w)),
    "data and weights returned": (REFUSED, lambda m, x: torch.mm(*Both.apply(m.l(x), m.w))),
    "raw data and weights returned": (REFUSED, lambda m, x: torch.mm(*Both.apply(x, m.w))),
    "a hook on a part": (EXACT, part_hooked),
    "a reentrant checkpoint": (REFUSED, reentrant),
}


def by_data(g: Tensor) -> None:
    """Samples exchanged by ``.data``."""
    g.data.copy_(g.flip(0))


def by_numpy(g: Tensor) -> None:
    """Samples exchanged by numpy."""
    g.numpy()[:] = g.numpy()[::-1].copy()


def scaled_by_data(g: Tensor) -> Tensor:
    """Divided by the norm of the batch, then returned as something new."""
    g.data.div_(g.norm())
    return g * 1


WRITES: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "by data": (REFUSED, by_data),
    "by numpy": (REFUSED, by_numpy),
    "by data, then new": (REFUSED, scaled_by_data),
    "each element by data": (EXACT, lambda g: g.data.clamp_(-0.1, 0.1) is None or None),
    "a look by numpy": (EXACT, lambda g: g.numpy().sum() and None),
}


def writes() -> Iterator[Case]:
    """Hooks and functions that write to gradients past torch."""
    for name, (expectation, change) in WRITES.items():

        def hooked(m: nn.Module, x: Tensor, change: Any = change) -> Tensor:
            h = m.l(x).tanh()
            h.register_hook(change)
            return m.k(h)

        def backward(g: Tensor, change: Any = change) -> Tensor:
            new = change(g)
            return g if new is None else new

        f = function_of(lambda h: h * 1, backward)
        table: Table = {
            "in a hook": (expectation, hooked),
            "in a function": (expectation, lambda m, x, f=f: m.k(f(m.l(x).tanh()))),
        }
        yield from on_module(f"written {name}", table, rand(N, N), l=lin(), k=lin(seed=3))


def cases() -> Iterator[Case]:
    """All of this file."""
    others = on_module("weight", OTHERS, rand(N, N), l=lin(), w=rand(N, N, seed=6))
    return chain(identities(), others, writes())
