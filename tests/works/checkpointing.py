"""Activation checkpointing, saved-tensor hooks and offloading."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from ..models import Fn, par
from .base import Cases, Outcome, alone, data, net, squares

CASES = Cases("Activation checkpointing and saved tensors")
Wrap = Callable[..., Tensor]
KINDS = {"reentrant": True, "not reentrant": False}


def wrapping(reentrant: bool) -> Wrap:
    return functools.partial(checkpoint, use_reentrant=reentrant)


def nested(wrap: Wrap, other: Wrap, model: nn.Sequential, x: Tensor) -> Tensor:
    def inner(h: Tensor) -> Tensor:
        return model[3](other(model[2], h))

    return model[4](wrap(lambda h: inner(model[1](h)), model[0](x)))


PLACES: dict[str, Callable[[Wrap, nn.Sequential, Tensor], Tensor]] = {
    "the first layer": lambda wrap, m, x: m[1:](wrap(m[0], x)),
    "the last layer": lambda wrap, m, x: wrap(m[4], m[:4](x)),
    "every layer": lambda wrap, m, x: functools.reduce(lambda h, part: wrap(part, h), m, x),
    "two blocks": lambda wrap, m, x: wrap(m[2:], wrap(m[:2], x)),
    "a block called twice": lambda wrap, m, x: m[4](wrap(m[2:4], wrap(m[2:4], m[0](x)))),
}


def wrapped(place: Any, reentrant: bool, after: bool, lean: bool) -> Outcome:
    def f(s: Any, x: Tensor) -> Tensor:
        # reentrant checkpointing needs an input that requires a gradient, with or without us
        return place(wrapping(reentrant), s.m, x.requires_grad_() if reentrant else x)

    return alone(Fn(f, m=net()), after=after, lean=lean)


for _kind, _reentrant in KINDS.items():
    for _place, _function in PLACES.items():
        _pattern = f"checkpoint, {_kind}, {_place}"
        CASES.right(_pattern, _function, _reentrant, False, False)(wrapped)
    _where = PLACES["two blocks"]
    CASES.right(f"checkpoint, {_kind}, backward after the block", _where, _reentrant, True, False)(
        wrapped
    )
    CASES.right(f"checkpoint, {_kind}, lean recording", _where, _reentrant, False, True)(wrapped)
    for _other, _inner in KINDS.items():
        _place_fn = functools.partial(
            lambda inner, wrap, m, x: nested(wrap, wrapping(inner), m, x), _inner
        )
        _pattern = f"checkpoint, {_kind}, around one that is {_other}"
        _add = CASES.refused if (_reentrant, _inner) == (False, True) else CASES.right
        _add(_pattern, _place_fn, _reentrant, False, False)(wrapped)


def rotated(s: Any, places: Tensor, turns: Any, h: Tensor, mask: Tensor) -> Tensor:
    return s.c(s.b(h * turns[0] + s.p(places), mask) * turns[1])


def placed(s: Any, places: Tensor, turns: Any, h: Tensor, mask: Tensor) -> Tensor:
    return s.w(h) + s.p(places)


def sharing(inside: Any, reentrant: bool, lean: bool) -> Outcome:
    """As many positions as samples, and a pair of rotations: sizes do not tell them apart."""
    turns = data(2, 2, 6).cos().unbind(0)

    def attention(s: Any, h: Tensor, mask: Tensor) -> Tensor:
        return s.w((h @ h.mT + mask).softmax(-1) @ h)

    model = Fn(
        lambda s, x: checkpoint(
            inside, s, torch.arange(2), turns, s.a(x), data(2, 2), use_reentrant=reentrant
        ).tanh(),
        a=nn.Linear(5, 6), b=Fn(attention, w=nn.Linear(6, 6)), c=nn.Linear(6, 3),
        p=nn.Embedding(2, 6), w=nn.Linear(6, 6),
    ).double()  # fmt: skip
    return alone(model, data(2, 2, 5), lean=lean)


for _kind, _reentrant in KINDS.items():
    _pattern = f"checkpoint, {_kind}, a block that takes a mask and rotations for all samples"
    CASES.right(_pattern, rotated, _reentrant, False)(sharing)
    CASES.right(f"{_pattern}, lean recording", rotated, _reentrant, True)(sharing)
    _pattern = f"checkpoint, {_kind}, a table of positions inside"
    CASES.right(_pattern, placed, _reentrant, False)(sharing)


@CASES.right("checkpoint with dropout inside, same random numbers in the recomputation")
def dropout() -> Outcome:
    layer = nn.Dropout(0.5)
    model = Fn(lambda s, x: s.b(checkpoint(s.d, s.a(x), use_reentrant=False)),
               a=nn.Linear(5, 6), b=nn.Linear(6, 3), d=layer).double()  # fmt: skip
    return as_plain(model)


def as_plain(model: nn.Module) -> Outcome:
    """Random models: the sum of rows is the plain program's gradient under the same seed."""
    from .patterns import same_as_plain

    return same_as_plain(model)


@CASES.right("checkpoint around weights that are computed, also with verify=True")
def computed() -> Outcome:
    def inside(s: Any, h: Tensor) -> Tensor:
        return h @ (s.w.softmax(0) * s.w.exp())

    def f(s: Any, x: Tensor) -> Tensor:
        return s.k(checkpoint(inside, s, s.l(x), use_reentrant=False).tanh())

    model = Fn(f, l=nn.Linear(5, 5), w=par(5, 5), k=nn.Linear(5, 3)).double()
    return Outcome(max(alone(model).error, alone(model, verify=True).error))


@CASES.right("checkpoint_sequential")
def sequential() -> Outcome:
    f = lambda s, x: checkpoint_sequential(s.m, 2, x, use_reentrant=False)
    return alone(Fn(f, m=net()))


@CASES.right("selective checkpointing (a policy by operator)")
def selective() -> Outcome:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    f = lambda s, x: checkpoint(s.m, x, use_reentrant=False, context_fn=contexts)
    return alone(Fn(f, m=net()))


def hooked(context: Callable[[], Any], inside: bool) -> Outcome:
    model = net()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with context():
            return squares(model, x)

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.m[:2](x)
        with context():
            return s.m[2:](h)

    return alone(Fn(forward, m=model)) if inside else alone(model, None, loss)


CASES.right("saved tensors offloaded to the CPU (save_on_cpu)", save_on_cpu, False)(hooked)
CASES.right("save_on_cpu around a part of the model", save_on_cpu, True)(hooked)


def to_numpy() -> Any:
    def unpack(packed: Any) -> Tensor:
        return torch.from_numpy(packed).to(torch.get_default_device())

    return saved_tensors_hooks(lambda t: t.detach().cpu().numpy().copy(), unpack)


def to_half() -> Any:
    return saved_tensors_hooks(lambda t: t.half(), lambda t: t.double())


CASES.right("saved-tensor hooks that give back what they got", to_numpy, False)(hooked)
CASES.refused("saved-tensor hooks that give back something else", to_half, False)(hooked)


@CASES.right("save_on_cpu around checkpoint")
def both() -> Outcome:
    def f(s: Any, x: Tensor) -> Tensor:
        with save_on_cpu():
            return s.m[4](checkpoint(s.m[:4], x, use_reentrant=False))

    return alone(Fn(f, m=net()), data())
