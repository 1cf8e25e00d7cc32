"""Attacks by hooks and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Table,
    case,
    lin,
    on_module,
    rand,
    seeded,
    seeded_losses,
)


def hooked(h: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    """The tensor, with a hook on its gradient."""
    h = h * 1
    h.register_hook(hook)
    return h * h


HOOKS: Table = {
    "reads": (EXACT, lambda m, x: hooked(m.l(x), lambda g: None)),
    "scales": (EITHER, lambda m, x: hooked(m.l(x), lambda g: 2 * g)),
    "crosses samples": (REFUSED, lambda m, x: hooked(m.l(x), lambda g: g.flip(0))),
    "sums over samples": (REFUSED, lambda m, x: hooked(m.l(x), lambda g: g.sum(0).expand_as(g))),
    "norm of the batch": (REFUSED, lambda m, x: hooked(m.l(x), lambda g: g / g.norm())),
    "clips by sample": (
        EITHER,
        lambda m, x: hooked(m.l(x), lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1.0)),
    ),
    "clips by the largest": (REFUSED, lambda m, x: hooked(m.l(x), lambda g: g / g.abs().max())),
    "on the output of a parameter": (
        REFUSED,
        lambda m, x: hook_output(m.l(x), lambda g: g.roll(1, 0)),
    ),
    "on a derived parameter": (EITHER, lambda m, x: x @ hooked(m.w, lambda g: 3 * g)),
    "clips a derived parameter": (
        EITHER,
        lambda m, x: x @ hooked(m.w, lambda g: g / g.norm()),
    ),
    "on a parameter": (EITHER, lambda m, x: on_parameter(m, lambda g: 3 * g) or x @ m.w),
    "clips a parameter": (EITHER, lambda m, x: on_parameter(m, lambda g: g / g.norm()) or x @ m.w),
    "dropped by a write to a view": (
        REFUSED,
        lambda m, x: dropped(m.l(x[:, None].expand(N, N, N))),
    ),
    "on a grad_fn": (REFUSED, lambda m, x: on_node(m.l(x) * 1)),
    "on a grad_fn, prehook": (REFUSED, lambda m, x: on_node_before(m.l(x) * 1)),
    "saved tensors crossed": (EITHER, lambda m, x: saved_crossed(m, x)),
    "saved tensors packed": (EXACT, lambda m, x: saved_packed(m, x)),
    "saved on cpu": (EXACT, lambda m, x: saved_on_cpu(m, x)),
    "multi-grad": (EITHER, lambda m, x: multi_grad(m.l(x) * 1)),
}


def hook_output(h: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    """A hook directly on the output of a layer."""
    h.register_hook(hook)
    return h * h


def dropped(h: Tensor) -> Tensor:
    """A hook on a view, which torch drops when the view is written to."""
    h.register_hook(lambda g: 3 * g)
    return h.mul_(2)


def on_parameter(m: nn.Module, hook: Callable[[Tensor], Tensor]) -> None:
    """A hook on the parameter itself."""
    m.w.register_hook(hook)


def on_node(h: Tensor) -> Tensor:
    """A hook on the node that made a tensor."""
    h.grad_fn.register_hook(lambda ins, outs: tuple(None if g is None else g.flip(0) for g in ins))
    return h * h


def on_node_before(h: Tensor) -> Tensor:
    """A pre-hook on the node that made a tensor."""
    h.grad_fn.register_prehook(lambda grads: tuple(g.flip(0) for g in grads))
    return h * h


def saved_crossed(m: nn.Module, x: Tensor) -> Tensor:
    """What backward sees of the forward comes from other samples."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.flip(0)):
        return m.k(m.l(x).tanh())


def saved_packed(m: nn.Module, x: Tensor) -> Tensor:
    """What backward needs is stored elsewhere meanwhile."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t * 1,), lambda p: p[0]):
        return m.k(m.l(x).tanh())


def saved_on_cpu(m: nn.Module, x: Tensor) -> Tensor:
    """Offloading."""
    with torch.autograd.graph.save_on_cpu():
        return m.k(m.l(x).tanh())


def multi_grad(h: Tensor) -> Tensor:
    """A hook that only looks."""
    g = h * 2
    torch.autograd.graph.register_multi_grad_hook((h, g), lambda grads: None)
    return g * h


def module_hooks() -> Iterator[Case]:
    """Hooks on modules."""
    table: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
        "forward mixes": (
            REFUSED,
            lambda layer: layer.register_forward_hook(lambda m, a, out: out - out.mean(0)),
        ),
        "forward scales": (
            EXACT,
            lambda layer: layer.register_forward_hook(lambda m, a, out: out * 2),
        ),
        "pre-hook crosses the input": (
            EITHER,
            lambda layer: layer.register_forward_pre_hook(lambda m, a: (a[0].flip(0),)),
        ),
        "backward reads": (
            EITHER,
            lambda layer: layer.register_full_backward_hook(lambda m, gi, go: None),
        ),
        "backward crosses": (
            REFUSED,
            lambda layer: layer.register_full_backward_hook(lambda m, gi, go: (gi[0].flip(0),)),
        ),
        "backward pre-hook crosses": (
            REFUSED,
            lambda layer: layer.register_full_backward_pre_hook(lambda m, go: (go[0].flip(0),)),
        ),
        "backward pre-hook scales": (
            EITHER,
            lambda layer: layer.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,)),
        ),
    }
    for name, (expectation, register) in table.items():
        layer = lin(seed=2)
        register(layer)
        body = lambda m, x: m.k(m.l(x).tanh()) * 2
        yield case(f"module hook: {name}", expectation, body, l=lin(), k=layer)


CHECKPOINTS: Table = {
    "non-reentrant": (EXACT, lambda m, x: checkpoint(block, m, x, use_reentrant=False)),
    "non-reentrant, first": (
        EXACT,
        lambda m, x: m.l(checkpoint(block, m, x, use_reentrant=False)),
    ),
    "non-reentrant, last": (
        EXACT,
        lambda m, x: checkpoint(block, m, m.l(x), use_reentrant=False),
    ),
    "non-reentrant, twice": (
        EXACT,
        lambda m, x: checkpoint(
            block, m, checkpoint(block, m, x, use_reentrant=False), use_reentrant=False
        ),
    ),
    "non-reentrant, nested": (
        EITHER,
        lambda m, x: checkpoint(
            lambda z: checkpoint(block, m, z, use_reentrant=False), m.l(x), use_reentrant=False
        ),
    ),
    "non-reentrant, mixing": (
        REFUSED,
        lambda m, x: checkpoint(lambda z: z - z.mean(0), m.l(x), use_reentrant=False),
    ),
    "non-reentrant, a parameter only": (
        EXACT,
        lambda m, x: x @ checkpoint(lambda w: w.tanh() @ w, m.w, use_reentrant=False),
    ),
}


def block(m: nn.Module, x: Tensor) -> Tensor:
    """What is recomputed."""
    return m.k(torch.tanh(x @ m.w)).tanh()


def reentrant() -> Iterator[Case]:
    """The old kind of checkpoint, which runs its own backward."""
    table: Table = {
        "reentrant, first": (
            EITHER,
            lambda m, x: m.l(checkpoint(block, m, x + 0 * m.w[0], use_reentrant=True)),
        ),
        "reentrant, last": (
            EITHER,
            lambda m, x: checkpoint(block, m, m.l(x), use_reentrant=True),
        ),
        "reentrant, mixing": (
            REFUSED,
            lambda m, x: checkpoint(lambda z: z - z.mean(0), m.l(x), use_reentrant=True),
        ),
        "reentrant, sequential": (
            EITHER,
            lambda m, x: checkpoint_sequential([m.k, m.l], 2, m.l(x), use_reentrant=True),
        ),
    }
    return on_module("checkpoint", table, rand(N, N), l=lin(), k=lin(seed=2), w=rand(N, N))


def again(m: nn.Module, x: Tensor, **options: Any) -> Tensor:
    """A checkpoint of the newer kind."""
    return checkpoint(lambda z: m.k(z).tanh(), x, use_reentrant=False, **options)


def offloaded(m: nn.Module, x: Tensor) -> Tensor:
    """A checkpoint whose saved tensors are packed as well."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return again(m, m.l(x))


def packed_inside(m: nn.Module, x: Tensor) -> Tensor:
    """Packing inside a checkpoint."""

    def inner(z: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return m.k(z).tanh()

    return checkpoint(inner, m.l(x), use_reentrant=False)


RECOMPUTED: Table = {
    "no early stop": (EXACT, lambda m, x: unstopped(m, m.l(x))),
    "no check": (EXACT, lambda m, x: again(m, m.l(x), determinism_check="none")),
    "no random state": (EXACT, lambda m, x: again(m, m.l(x), preserve_rng_state=False)),
    "nested, no check": (
        EITHER,
        lambda m, x: checkpoint(
            lambda z: again(m, z), m.l(x), use_reentrant=False, determinism_check="none"
        ),
    ),
    "nested, one layer": (
        EITHER,
        lambda m, x: checkpoint(lambda z: again(m, z), m.l(x), use_reentrant=False),
    ),
    "nested, layer outside": (
        EITHER,
        lambda m, x: checkpoint(lambda z: m.l(again(m, z)), m.l(x), use_reentrant=False),
    ),
    "nested, layer before": (
        EITHER,
        lambda m, x: checkpoint(lambda z: again(m, m.l(z)), m.l(x), use_reentrant=False),
    ),
    "nested thrice": (
        EITHER,
        lambda m, x: checkpoint(
            lambda y: checkpoint(lambda z: again(m, z), y, use_reentrant=False),
            m.l(x),
            use_reentrant=False,
        ),
    ),
    "sequential": (
        EXACT,
        lambda m, x: checkpoint_sequential([m.k, m.l], 2, x, use_reentrant=False),
    ),
    "packed outside": (EITHER, offloaded),
    "packed inside": (EITHER, packed_inside),
    "mixing inside, hidden": (
        REFUSED,
        lambda m, x: checkpoint(lambda z: again(m, z - z.mean(0)), m.l(x), use_reentrant=False),
    ),
    "attention inside": (
        EXACT,
        lambda m, x: checkpoint(
            lambda z: m.a(z[:, None], z[:, None], z[:, None])[0], m.l(x), use_reentrant=False
        ),
    ),
    "recurrent inside": (
        EITHER,
        lambda m, x: checkpoint(lambda z: m.r(z[:, None])[0], m.l(x), use_reentrant=False),
    ),
    "dropout inside": (
        EXACT,
        lambda m, x: checkpoint(
            lambda z: nn.functional.dropout(m.k(z), 0.5), m.l(x), use_reentrant=False
        ),
    ),
    "reads a value": (
        EITHER,
        lambda m, x: checkpoint(
            lambda z: m.k(z) * (2 if float(z.sum()) > 0 else 3), m.l(x), use_reentrant=False
        ),
    ),
}


def unstopped(m: nn.Module, h: Tensor) -> Tensor:
    """Recomputed to the end."""
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return again(m, h)


def recomputed() -> Iterator[Case]:
    """More checkpoints of the newer kind."""
    parts = {
        "l": lin(),
        "k": lin(seed=2),
        "a": seeded(nn.MultiheadAttention(N, 2, batch_first=True)),
        "r": seeded(nn.GRU(N, N, batch_first=True)),
    }
    for item in on_module("recomputed", RECOMPUTED, rand(N, N), **parts):
        yield item._replace(loss_fn=seeded_losses)


def cases() -> Iterator[Case]:
    """All of this file."""
    parts = {"l": lin(), "k": lin(seed=2), "w": 0.8 * rand(N, N, seed=6)}
    return chain(
        on_module("hook", HOOKS, rand(N, N), **parts),
        module_hooks(),
        on_module("checkpoint", CHECKPOINTS, rand(N, N), **parts),
        reentrant(),
        recomputed(),
    )
