"""Attacks by plain backward passes, and by writes behind the recorder's back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Net,
    Script,
    lin,
    spread,
)
from .rows import Pair, X, Y, doubled, native, two


def user_backward_first() -> Pair:
    """A plain backward on the losses before the tape's: both count, as they do in ``.grad``."""
    model = two()
    with persample.record(model) as tape:
        losses = spread(model(X))
        losses.sum().backward(retain_graph=True)
        tape.backward(losses)
    return tape.grads(), doubled(native(model, spread(model(X))), 2.0)


def user_backward_only() -> Pair:
    """A plain backward instead of the tape's."""
    model = two()
    with persample.record(model) as tape:
        (3 * spread(model(X))).sum().backward()
    return tape.grads(), native(model, 3 * spread(model(X)))


def mixed_backward_first() -> Pair:
    """A plain backward of a loss that mixes, before the tape's."""
    model = two()
    with persample.record(model) as tape:
        out = model(X)
        (out.sum() ** 2).backward(retain_graph=True)
        tape.backward(spread(out))
    return tape.grads(), native(model, spread(model(X)))


def mixed_backward_after() -> Pair:
    """A plain backward of a loss that mixes, after the block."""
    model = two()
    with persample.record(model) as tape:
        out = model(X)
        tape.backward(spread(out), retain_graph=True)
    (out.sum() ** 2).backward()
    return tape.grads(), native(model, spread(model(X)))


def saliency_first() -> Pair:
    """autograd.grad of a loss that mixes, by a hidden tensor, before the tape's backward."""
    model = two()
    with persample.record(model) as tape:
        hidden = model.l(X).tanh()
        out = model.k(hidden)
        torch.autograd.grad(out.sum() ** 2, hidden, retain_graph=True)
        tape.backward(spread(out))
    return tape.grads(), native(model, spread(model(X)))


def kept_gradient() -> Pair:
    """A hook keeps a gradient; it is overwritten before the query."""
    model = two()
    kept: list[Tensor] = []
    with persample.record(model) as tape:
        out = model(X)
        out.register_hook(lambda grad: kept.append(grad))
        tape.backward(spread(out))
    kept[0].zero_()
    return tape.grads(), native(model, spread(model(X)))


def retained_gradient() -> Pair:
    """A retained gradient is overwritten before the query."""
    model = two()
    with persample.record(model) as tape:
        out = model(X)
        out.retain_grad()
        tape.backward(spread(out))
    out.grad.zero_()
    return tape.grads(), native(model, spread(model(X)))


def hidden_overwritten() -> Pair:
    """An activation is overwritten before the query."""
    model = two()
    with persample.record(model) as tape:
        hidden = model.l(X).tanh()
        tape.backward(spread(model.k(hidden)))
    with torch.no_grad():
        hidden.zero_()
    return tape.grads(), native(model, spread(model(X)))


def buffer_of_batches() -> Pair:
    """One input buffer for two batches inside one block."""
    model, buffer = two(), X.clone()
    with persample.record(model) as tape:
        tape.backward(spread(model(buffer)))
        buffer.copy_(Y)
        tape.backward(spread(model(buffer)))
    return tape.grads(), native(model, spread(model(X)) + spread(model(Y)))


def changed(when: str, what: str) -> Callable[[], Pair]:
    """A tensor is overwritten between forward, backward and the query."""

    def run() -> Pair:
        model, x = two(), X.clone()
        expected = native(model, spread(model(x)))
        with persample.record(model) as tape:
            losses = spread(model(x))
            if when == "before backward":
                overwrite(model, x, what)
            tape.backward(losses)
        if when == "before the query":
            overwrite(model, x, what)
        return tape.grads(), expected

    return run


def overwrite(model: nn.Module, x: Tensor, what: str) -> None:
    """Change the input or the parameters."""
    with torch.no_grad():
        if what == "input":
            x.mul_(2)
        if what == "input data":
            x.data.mul_(2)
        if what == "input numpy":
            x.numpy()[:] *= 2
        if what == "parameters":
            for parameter in model.parameters():
                parameter.mul_(2)
        if what == "parameter data":
            for parameter in model.parameters():
                parameter.data = parameter.data * 2
        if what == "optimizer step":
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            torch.optim.SGD(model.parameters(), 1.0).step()


def first_result_spoilt() -> Pair:
    """The caller writes into the first answer."""
    model = two()
    with persample.record(model) as tape:
        tape.backward(spread(model(X)))
    for rows in tape.grads().values():
        rows.zero_()
    return tape.grads(), native(model, spread(model(X)))


def recomputed(body: Callable[..., Tensor], change: Callable[[Any], None]) -> Callable[[], Pair]:
    """A number that recomputed code reads is another one when a lean recording is asked."""

    def run() -> Pair:
        model = Net(body, l=lin(), k=lin(seed=2), p=nn.Dropout(0.5), heat=1.0)
        torch.manual_seed(3)
        expected = native(model, spread(model(X)))
        torch.manual_seed(3)
        with persample.record(model, lean=True) as tape:
            tape.backward(spread(model(X)))
        change(model)
        return tape.grads(), expected

    return run


def drop(m: Any) -> None:
    """Another rate of dropout."""
    m.p.p = 0.1


def cool(m: Any) -> None:
    """Another temperature."""
    m.heat = 0.5


def again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Checkpointed."""
    return checkpoint(function, x, use_reentrant=False)  # type: ignore[no-any-return]


RECOMPUTED: dict[str, tuple[str, Callable[[], Pair]]] = {
    "nothing": (
        EXACT,
        recomputed(lambda m, x: m.k(again(lambda x: m.p(m.l(x).sin()), x)), lambda m: None),
    ),
    "dropout": (REFUSED, recomputed(lambda m, x: m.k(again(lambda x: m.p(m.l(x)), x)), drop)),
    "dropout alone": (REFUSED, recomputed(lambda m, x: m.k(again(m.p, m.l(x))), drop)),
    "temperature": (
        REFUSED,
        recomputed(lambda m, x: m.k(again(lambda h: (h * m.heat).softmax(1), m.l(x))), cool),
    ),
}


STALE: dict[str, tuple[str, Callable[[], Pair]]] = {
    "plain backward first": (EITHER, user_backward_first),
    "plain backward only": (EITHER, user_backward_only),
    "plain mixing backward first": (REFUSED, mixed_backward_first),
    "plain mixing backward after": (EITHER, mixed_backward_after),
    "saliency first": (EITHER, saliency_first),
    "kept gradient overwritten": (EITHER, kept_gradient),
    "retained gradient overwritten": (EITHER, retained_gradient),
    "activation overwritten": (EITHER, hidden_overwritten),
    "one input buffer, two batches": (EITHER, buffer_of_batches),
    "answer spoilt by the caller": (EXACT, first_result_spoilt),
}


def scripts() -> Iterator[Script]:
    """All of this file."""
    for name, (expectation, run) in STALE.items():
        yield Script(f"order: {name}", run, expectation)
    for name, (expectation, run) in RECOMPUTED.items():
        yield Script(f"recomputed by another number: {name}", run, expectation)
    whats = ("input", "input data", "parameters", "parameter data", "optimizer step")
    for when in ("before backward", "before the query"):
        for what in whats:
            silent = "data" in what and when == "before backward"
            if not silent:  # autograd itself does not notice
                yield Script(f"changed {when}: {what}", changed(when, what), EITHER)
