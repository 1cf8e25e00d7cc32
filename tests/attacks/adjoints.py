"""Attacks by custom functions that recompute in backward and return gradients of parameters.

Checkpoints that take weights as arguments, and adjoints of differential equations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .base import (
    EITHER,
    EXACT,
    RECENT,
    REFUSED,
    Case,
    N,
    Table,
    case,
    lin,
    on_module,
    rand,
)

Run = Callable[..., Tensor]
Finish = Callable[[Tensor, list[Tensor]], list[Tensor]]


class Again(torch.autograd.Function):
    """``run(x, *weights)`` without a graph, and once more in backward."""

    @staticmethod
    def forward(ctx: Any, run: Run, how: dict[str, Any], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run, ctx.how = run, how
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return run(x, *weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), how = grads, ctx.how
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            if how.get("leaves"):
                weights = [w.detach().requires_grad_() for w in weights]
            out = how.get("other", ctx.run)(x, *weights)
        seed = how.get("seed", lambda g: g)(grad)
        if how.get("backward"):
            out.backward(seed)
            return None, None, x.grad, *(None for _ in weights)
        wanted = [w for w in weights if w.requires_grad]
        create, twice = how.get("create", False), how.get("twice")
        found = torch.autograd.grad(out, [x, *wanted], seed, allow_unused=True, create_graph=create)
        own = [
            torch.zeros_like(w) if g is None else g for g, w in zip(found[1:], wanted, strict=True)
        ]
        if twice is not None:
            with torch.enable_grad():
                root = sum(twice(g).sum() for g in own)
            own = list(torch.autograd.grad(root, wanted))
        own = how.get("finish", lambda g, rows: rows)(grad, own)
        return None, None, found[0], *(own.pop(0) if w.requires_grad else None for w in weights)


class Inside(torch.autograd.Function):
    """Layers without a graph; backward runs them again, and back-propagates from ``extra``, too."""

    @staticmethod
    def forward(ctx: Any, m: Any, extra: Callable[[Any, Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.m, ctx.extra = m, extra
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.tanh(m.l(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            roots = torch.tanh(ctx.m.l(x)), ctx.extra(ctx.m, x)
        torch.autograd.backward(roots, (grads[0], torch.ones_like(roots[1])))
        return None, None, x.grad


def inside(extra: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.k(Inside.apply(m, extra, m.k(x)))


ROOTS: Table = {
    "a constant": (
        EXACT if RECENT else REFUSED,
        inside(lambda m, x: torch.zeros((), requires_grad=True)),
    ),
    "constants": (
        EXACT if RECENT else REFUSED,
        inside(lambda m, x: 2 * torch.ones(N, requires_grad=True)),
    ),
    "a penalty of weights": (REFUSED, inside(lambda m, x: m.l.weight.square().sum())),
    "a penalty of all samples": (REFUSED, inside(lambda m, x: x.sum(0).square().sum())),
}


def on_data(m: Any, x: Tensor, **how: Any) -> Tensor:
    """The function first of all: its data need no gradient."""
    return m.k(Again.apply(layer, how, x, m.l.weight, m.l.bias))


def scaled_by_data(value: Callable[[Tensor], Any]) -> Run:
    """A run whose scale is a number of all data."""
    return lambda x, w, b: layer(x, w, b) * value(x.detach())


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(torch.nn.functional.linear(x, weight, bias))


def centered(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer(x - x.mean(0), weight, bias)


def again(m: Any, x: Tensor, run: Run = layer, weight: Any = None, **how: Any) -> Tensor:
    """A layer, the function, a layer."""
    w = m.l.weight if weight is None else weight
    return m.k(Again.apply(run, how, m.k(x), w, m.l.bias))


def flattened(change: Callable[[Tensor], Tensor]) -> Finish:
    """Gradients of samples and of parameters in one vector, and taken apart again."""

    def finish(grad: Tensor, rows: list[Tensor]) -> list[Tensor]:
        pieces = [grad.flatten(), *(row.flatten() for row in rows)]
        joined = change(torch.cat(pieces))
        sizes = [len(piece) for piece in pieces]
        return [
            part.view(row.shape) for part, row in zip(joined.split(sizes)[1:], rows, strict=True)
        ]

    return finish


def written(grad: Tensor, rows: list[Tensor]) -> list[Tensor]:
    """The same by writing to a buffer."""
    size = grad.numel()
    buffer = torch.zeros(2, size + rows[0].numel(), dtype=grad.dtype)
    buffer[1, :size] = grad.flatten()
    buffer[1, size:] = rows[0].flatten()
    buffer[1, :size] += grad.flatten()
    buffer[1, size:] -= 0.5 * rows[0].flatten()
    return [buffer[1, size:].view(rows[0].shape) * 2, rows[1]]


def crossed(grad: Tensor, rows: list[Tensor]) -> list[Tensor]:
    """Elements of a sample are written over sums."""
    joined = torch.cat([grad.flatten(), rows[0].flatten()])
    joined[-grad.numel() :] = grad.flatten()
    return [joined[grad.numel() :].view(rows[0].shape), rows[1]]


def each(change: Callable[[Tensor], Tensor]) -> Finish:
    return lambda grad, rows: [change(row) for row in rows]


RIGHT: Table = {
    "a checkpoint": (EXACT, again),
    "first of all": (EXACT, on_data),
    "a checkpoint, twice": (EXACT, lambda m, x: again(m, again(m, x))),
    "by leaves of its own": (EXACT, lambda m, x: again(m, x, leaves=True)),
    "of a derived weight": (EXACT, lambda m, x: again(m, x, weight=m.l.weight * 2)),
    "of a tied weight": (EXACT, lambda m, x: m.l(again(m, x))),
    "of the weight of the layer before": (EXACT, lambda m, x: again(m, x, weight=m.k.weight)),
    "a weight that is not used": (
        EXACT, lambda m, x: again(m, x, lambda a, w, b: torch.tanh(a @ w.T))),
    "a weight that is no argument": (
        EITHER, lambda m, x: again(m, x, lambda a, w, b: layer(a, w, b) @ m.k.weight)),
    "constant seeds": (EITHER, lambda m, x: again(m, x, seed=torch.ones_like)),
    "flattened": (EXACT, lambda m, x: again(m, x, finish=flattened(lambda v: v * 0.5 + v / 2))),
    "flattened, written": (EXACT, lambda m, x: again(m, x, finish=written)),
    "flattened, a step": (
        EXACT, lambda m, x: again(m, x, finish=flattened(lambda v: torch.stack([v, -v])[0]))),
    "differentiable": (EXACT, lambda m, x: again(m, x, create=True)),
    "differentiable, flattened": (
        EXACT, lambda m, x: again(m, x, create=True, finish=flattened(lambda v: v * 3))),
    "differentiated again": (
        EITHER, lambda m, x: again(m, x, create=True, twice=lambda g: 2 * g)),
}  # fmt: skip

WRONG: Table = {
    "first of all, clipped by a number": (
        REFUSED, lambda m, x: on_data(
            m, x, finish=each(lambda g: g / max(1.0, float(g.norm()))))),
    "first of all, a number of all data": (
        REFUSED, lambda m, x: on_data(m, x, other=scaled_by_data(lambda d: float(d.norm())))),
    "first of all, a norm of all data": (
        REFUSED, lambda m, x: on_data(m, x, other=scaled_by_data(torch.norm))),
    "samples interact": (REFUSED, lambda m, x: again(m, x, centered)),
    "samples interact in backward": (REFUSED, lambda m, x: again(m, x, other=centered)),
    "seeds of others": (REFUSED, lambda m, x: again(m, x, seed=lambda g: g.roll(1, 0))),
    "seeds of all": (REFUSED, lambda m, x: again(m, x, seed=lambda g: g * g.norm())),
    "by backward()": (EITHER, lambda m, x: again(m, x, backward=True)),
    "squares": (REFUSED, lambda m, x: again(m, x, finish=each(torch.square))),
    "products": (REFUSED, lambda m, x: again(m, x, finish=each(lambda g: g * g))),
    "normed": (REFUSED, lambda m, x: again(m, x, finish=each(lambda g: g / g.norm()))),
    "reciprocals": (REFUSED, lambda m, x: again(m, x, finish=each(lambda g: 1 / g))),
    "shifted": (REFUSED, lambda m, x: again(m, x, finish=each(lambda g: g + 1))),
    "clipped": (REFUSED, lambda m, x: again(m, x, finish=each(lambda g: g.clamp(-0.1, 0.1)))),
    "clipped by a number": (
        REFUSED, lambda m, x: again(m, x, finish=each(lambda g: g / max(1.0, float(g.norm()))))),
    "differentiable, squares": (
        REFUSED, lambda m, x: again(m, x, create=True, finish=each(torch.square))),
    "differentiable, normed": (
        REFUSED, lambda m, x: again(m, x, create=True, finish=each(lambda g: g / g.norm()))),
    "squares, differentiated again": (
        REFUSED, lambda m, x: again(m, x, create=True, twice=torch.square)),
    "differentiable, samples interact": (
        REFUSED, lambda m, x: again(m, x, other=centered, create=True)),
    "flattened, squares": (REFUSED, lambda m, x: again(m, x, finish=flattened(torch.square))),
    "flattened, products": (REFUSED, lambda m, x: again(m, x, finish=flattened(lambda v: v * v))),
    "flattened, normed": (
        REFUSED, lambda m, x: again(m, x, finish=flattened(lambda v: v / v.norm()))),
    "flattened, reciprocals": (
        REFUSED, lambda m, x: again(m, x, finish=flattened(lambda v: 1 / v))),
    "flattened, turned": (
        REFUSED, lambda m, x: again(m, x, finish=flattened(lambda v: v + v.roll(1, 0)))),
    "flattened, minus the mean": (
        REFUSED, lambda m, x: again(m, x, finish=flattened(lambda v: v - v.mean()))),
    "flattened, by the largest": (
        REFUSED, lambda m, x: again(m, x, finish=flattened(lambda v: v * v.max()))),
    "flattened, sorted": (
        REFUSED, lambda m, x: again(m, x, finish=flattened(lambda v: v.sort().values))),
    "flattened, written over": (REFUSED, lambda m, x: again(m, x, finish=crossed)),
}  # fmt: skip


def cases() -> Iterator[Case]:
    """On a module with two layers."""
    for name, table in (("adjoint", RIGHT), ("adjoint", WRONG), ("root beside", ROOTS)):
        yield from on_module(name, table, rand(N, N), l=lin(), k=lin(seed=3))
    frozen = lin()
    frozen.weight.requires_grad_(False)
    yield case("adjoint: a frozen weight", EXACT, again, rand(N, N), l=frozen, k=lin(seed=3))
