"""Gradients that somebody writes to in place: a function's backward, a hook, the one who asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

import persample

from .base import EITHER, EXACT, Case, Net, Script, Table, lin, on_module, rand, spread
from .rows import Pair, native

CUBE = rand(4, 4, 4)


class Doubled(torch.autograd.Function):
    """Writes to the gradient that it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mul_(2)


class Hidden(Doubled):
    """The same, so that no version counts it."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad.data.mul_(2)
        return grad


class Gated(torch.autograd.Function):
    """A ReLU as it is often written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad[x < 0] = 0
        return grad


class Signs(torch.autograd.Function):
    """Of a weight alone."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return grad.mul_(2 * (w.abs() < 1))


def hooked(h: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    """The tensor, with a hook on its gradient."""
    h.register_hook(hook)
    return h


def doubling(grad: Tensor) -> None:
    """A hook that returns nothing."""
    grad.mul_(2)


FUNCTIONS: Table = {
    "then a bias": (EXACT, lambda m, x, f: torch.tanh(f(m.l(x)) + m.b)),
    "then a bias of every position": (EXACT, lambda m, x, f: torch.tanh(f(m.l(x)) + m.w)),
    "then a scale": (EXACT, lambda m, x, f: torch.tanh(f(m.l(x)) * m.b)),
    "beside a linear layer": (EXACT, lambda m, x, f: torch.tanh(f(m.l(x)) + m.k(m.l(x)))),
    "beside a linear layer, first": (EXACT, lambda m, x, f: torch.tanh(m.k(m.l(x)) + f(m.l(x)))),
}
WRITERS: dict[str, Callable[[Tensor], Tensor]] = {
    "doubled": Doubled.apply,
    "hidden": Hidden.apply,
    "gated": Gated.apply,
    "hook": lambda h: hooked(h, doubling),
    "clamping hook": lambda h: hooked(h, lambda g: g.clamp_(-0.1, 0.1)),  # not linear: no c-check
}
WEIGHTS: Table = {
    "scale": (EXACT, lambda m, x: m.l(x) * Signs.apply(m.b)),
    "bias": (EXACT, lambda m, x: m.l(x) + Signs.apply(m.b)),
    "matrix": (EXACT, lambda m, x: m.l(x) @ Signs.apply(m.w)),
}


def cases() -> Iterator[Case]:
    """All of this file but the scripts."""
    parts = {"l": lin(), "k": lin(seed=2), "w": rand(4, 4, seed=6), "b": rand(4, seed=7)}
    found: list[Iterator[Case]] = []
    for writer, apply in WRITERS.items():
        for data in (CUBE, CUBE[0]):
            bodies = {
                name: (
                    EITHER if "hook" in writer else expectation,
                    lambda m, x, body=body, apply=apply: body(m, x, apply),
                )
                for name, (expectation, body) in FUNCTIONS.items()
                if data is CUBE or "position" not in name  # else autograd.grad hands it out, too
            }
            found.append(on_module(f"overwritten {data.dim()}: {writer}", bodies, data, **parts))
    found.append(on_module("overwritten weight", WEIGHTS, CUBE, **parts))
    found.append(on_module("overwritten weight, rows", WEIGHTS, CUBE[0], **parts))
    return chain.from_iterable(found)


ASKED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "bias": lambda m, x: m.l(x) + m.b,
    "copied bias": lambda m, x: m.l(x) + m.b.clone(),
    "bias of signs": lambda m, x: m.l(x) + Signs.apply(m.b),
    "complex scale": lambda m, x: torch.view_as_real(
        torch.view_as_complex(m.l(x).unflatten(-1, (2, 2)))
        * torch.view_as_complex(m.b.unflatten(-1, (2, 2)))
    ),
    "matrix of one position": lambda m, x: x[:, 0] @ m.w.clone(),
    "two uses": lambda m, x: (m.l(x) + m.b) * m.b.clone(),
}


def answers_overwritten(body: Callable[[Any, Tensor], Tensor], lean: bool) -> Callable[[], Pair]:
    """Whoever asked writes to what was given, and asks again."""

    def run() -> Pair:
        model: nn.Module = Net(body, l=lin(), w=rand(4, 4, seed=6), b=rand(4, seed=7))
        with persample.record(model, lean=lean) as tape:
            tape.backward(spread(model(CUBE)), retain_graph=True)
        given = [tape.grads(), tape.weighted_sum(torch.ones(4)), tape.clipped_sum(1e9)]
        given += [tape.parameter_norms(), tape.second_moment()]
        given.append({"norms": tape.norms(), "gram": tape.gram()})
        for answer in given:
            for tensor in answer.values():
                tensor.fill_(7)
        norms = {"norms": tape.norms()} | tape.parameter_norms()
        expected = native(model, spread(model(CUBE)))
        sizes = {k: g.flatten(1).norm(dim=1) for k, g in expected.items()}
        sizes["norms"] = torch.stack(list(sizes.values())).norm(dim=0)
        rows = {f"rows of {k}": g for k, g in tape.grads().items()}
        return rows | norms, {f"rows of {k}": g for k, g in expected.items()} | sizes

    return run


def hooked_before(how: str) -> Callable[[], Pair]:
    """A leaf with a hook from before the block, which writes to the gradient."""

    def run() -> Pair:
        leaf, data = rand(4, 4).requires_grad_(), rand(4, 4, seed=2)
        leaf.register_hook(doubling)
        body = lambda m, x: (x + m.b).sin() if how != "captured" else (x * m.b + leaf + m.b).sin()
        model = Net(body, b=rand(4, seed=7))
        x = data if how == "captured" else leaf
        with persample.record(model) as tape:
            if how == "marked":
                tape.mark(x)
            tape.backward(spread(model(x)))
        return tape.grads(), native(model, spread(model(x)))

    return run


def scripts() -> Iterator[Script]:
    """Answers that are written to, and hooks that nobody saw registered."""
    for how in ("received", "marked", "captured"):
        yield Script(f"overwritten: hooked leaf, {how}", hooked_before(how), EXACT)
    for name, body in ASKED.items():
        for lean in (False, True):
            run = answers_overwritten(body, lean)
            yield Script(f"overwritten answers: {name}{', lean' * lean}", run, EXACT)
