"""Attacks by memory of the caller's own that is refilled after backward, unseen by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample

from .afterwards import LEAN, by_data, by_numpy
from .base import EITHER, N, Net, Script, lin, rand, spread
from .rows import Pair, native

Body = Callable[[Any, Tensor], Tensor]
HOW: dict[str, Callable[[Tensor], None]] = {"numpy": by_numpy, "data": by_data}


def model_of(body: Body | None = None) -> Any:
    """Layers, and constants that are larger than what is used of them."""
    constants = {
        "c": nn.Buffer(rand(N + 2, N, seed=7)),
        "d": nn.Buffer(rand(N, N, seed=8)),
        "ids": nn.Buffer(torch.tensor([2, 0, 1, 3])),
    }
    return Net(
        body or (lambda m, x: m.l(x)), l=lin(), k=lin(seed=2), w=rand(N, N, seed=6), **constants
    )


MARKED: dict[str, tuple[Tensor, Body]] = {
    "rows": (rand(N + 2, N), lambda m, x: m.l(x)),
    "factor": (rand(N + 2, N), lambda m, x: m.l(x) * m.w[0]),
    "ids": (torch.arange(N + 2) % N, lambda m, i: F.embedding(i, m.w)),
}
CONSTANTS: dict[str, Body] = {  # views that are gone when their memory is refilled
    "rows": lambda m, x: m.k(m.c[:N]) * m.l(x),
    "expanded": lambda m, x: m.k(m.c[0].expand(N, N)) * m.l(x),
    "of NumPy": lambda m, x: m.k(torch.from_numpy(m.c.numpy())[:N]) * m.l(x),
    "behind": lambda m, x: m.k(m.l(x) * m.c[:N]),
    "mask of a weight": lambda m, x: x @ (m.w * m.c[:N]),
}
LATER: dict[str, tuple[Body, Body]] = {  # of two backward passes, the second reads ``d``
    "data": (lambda m, x: F.embedding(m.ids, m.w) * x, lambda m, x: m.l(x @ m.d)),
    "mask": (lambda m, x: F.embedding(m.ids, m.w) * x, lambda m, x: x @ (m.l.weight * m.d)),
    "parameters": (lambda m, x: m.k(m.c[:N]) * x, lambda m, x: torch.cdist(x, m.l.weight * m.d)),
}


def marked(name: str, how: str, *, part: bool, **options: Any) -> Callable[[], Pair]:
    """Data that the model does not receive."""

    def run() -> Pair:
        (data, body), model = MARKED[name], model_of()
        memory = data.clone()
        x = memory[:N] if part else memory[:N].clone()
        rows = native(model, spread(body(model, data[:N])))
        with persample.record(model, **options) as tape:
            tape.mark(x)
            tape.backward(spread(body(model, x)))
        HOW[how](memory if part else x)
        return tape.grads(), rows

    return run


def viewed(name: str, how: str, **options: Any) -> Callable[[], Pair]:
    """Constants of which the model takes views."""

    def run() -> Pair:
        model, x = model_of(CONSTANTS[name]), rand(N, N)
        rows = native(model, spread(model(x)))
        with persample.record(model, **options) as tape:
            tape.backward(spread(model(x)))
        HOW[how](model.c)
        return tape.grads(), rows

    return run


def later(name: str, how: str) -> Callable[[], Pair]:
    """A constant that only the second backward pass depends on."""

    def run() -> Pair:
        model, x = model_of(), rand(N, N)
        losses = [lambda body=body: spread(body(model, x)) for body in LATER[name]]
        rows = native(model, losses[0]() + losses[1]())
        with persample.record(model) as tape:
            tape.mark(x)
            first, second = losses[0](), losses[1]()
            tape.backward(first)
            tape.backward(second)
        HOW[how](model.d)
        return tape.grads(), rows

    return run


def results(how: str, *, parts: bool, **options: Any) -> Callable[[], Pair]:
    """The caller computes on in the memory of what modules returned."""

    def run() -> Pair:
        whole = lambda m, x: (lambda h: {"out": m.k(h), "hidden": [h]})(m.l(x))
        model, x = model_of(whole), rand(N, N)

        def step() -> tuple[Tensor, list[Tensor]]:
            if parts:
                h = model.l(x)
                out = model.k(h)
            else:
                (h,), out = (found := model(x))["hidden"], found["out"]
            return spread(out) + spread(h), [h, out]

        rows = native(model, step()[0])
        with persample.record(model, **options) as tape:
            losses, given = step()
            tape.backward(losses)
        for tensor in given:
            HOW[how](tensor.detach())
        return tape.grads(), rows

    return run


def scripts() -> Iterator[Script]:
    """All of this file: a copy was kept, or the question is refused."""
    for how in HOW:
        for options in ({}, LEAN):
            note = f"by {how}{', lean' * bool(options)}"
            for name in MARKED:
                for part in (False, True):
                    run = marked(name, how, part=part, **options)
                    place = "view" if part else "tensor"
                    yield Script(f"refilled mark: {name}, {place}, {note}", run, EITHER)
            for parts in (False, True):
                name = "parts" if parts else "whole"
                run = results(how, parts=parts, **options)
                yield Script(f"refilled results: {name}, {note}", run, EITHER)
            for name in CONSTANTS:
                yield Script(f"refilled: {name}, {note}", viewed(name, how, **options), EITHER)
        for name in LATER:
            yield Script(f"refilled, second backward: {name}, by {how}", later(name, how), EITHER)
