"""Attacks by caches, foreign modules, chosen parameters and the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample
from persample.testing import oracle

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    N,
    Net,
    Script,
    ints,
    lin,
    rand,
    row_losses,
    seeded,
    spread,
)
from .rows import Pair, X, Y, both, found, native, two


def cached_outside() -> Pair:
    """A derived parameter that was computed before the recording."""
    model = Net(lambda m, x: x @ m.cache, w=rand(N, N, seed=6))
    object.__setattr__(model, "cache", model.w * 2)
    return both(model, lambda: spread(model(X)))


def cached_partly() -> Pair:
    """A parameter used directly and by a tensor from before the recording."""
    model = Net(lambda m, x: (x @ m.cache) * (x @ m.w), w=rand(N, N, seed=6))
    object.__setattr__(model, "cache", model.w * 2)
    return both(model, lambda: spread(model(X)))


def cached_between() -> Pair:
    """A derived parameter kept from another recording."""
    model = Net(cached_weight, w=rand(N, N, seed=6))
    found(model, lambda: spread(model(X)))
    return both(model, lambda: spread(model(Y)))


def cached_weight(m: nn.Module, x: Tensor) -> Tensor:
    """Computed at the first call only; a leaf afterwards keeps its graph."""
    if not hasattr(m, "cache"):
        object.__setattr__(m, "cache", m.w.tanh())
    return x @ m.w + (x @ m.cache).detach() * (x @ m.w)


def foreign_parameter() -> Pair:
    """A parameter of another module takes part."""
    model, other = two(), lin(seed=7)
    return both(model, lambda: spread(other(model(X))))


def foreign_mixing() -> Pair:
    """Another module mixes the samples."""
    model, norm = two(), nn.BatchNorm1d(N).double()
    return both(model, lambda: spread(norm(model(X))))


def replaced_parameter() -> Pair:
    """A parameter object is replaced inside the block."""
    model = two()
    with persample.record(model) as tape:
        model.l.weight = nn.Parameter(model.l.weight.detach() * 2)
        tape.backward(spread(model(X)))
    return tape.grads(), native(model, spread(model(X)))


def frozen_inside() -> Pair:
    """A parameter is frozen inside the block."""
    model = two()
    with persample.record(model) as tape:
        model.l.weight.requires_grad_(False)
        tape.backward(spread(model(X)))
    rows = native(model, spread(model(X)))
    answer = tape.grads()
    return {k: answer[k] for k in rows}, rows


def some_parameters() -> Pair:
    """Only some parameters are asked for."""
    model = two()
    rows = native(model, spread(model(X)))
    answer = found(model, lambda: spread(model(X)), params=["l.weight"])
    return answer, {"l.weight": rows["l.weight"]}


def mixing_before_chosen() -> Pair:
    """Samples mix in front of the only parameter asked for: exact natively, mixed alone."""
    model = Net(lambda m, x: m.k(m.l(x) - m.l(x).mean(0)), l=lin(), k=lin(seed=2))
    rows = native(model, spread(model(X)))
    answer = found(model, lambda: spread(model(X)), params=["k.weight"])
    return answer, {"k.weight": rows["k.weight"]}


def mixing_after_chosen() -> Pair:
    """Samples mix behind the only parameter asked for."""
    model = Net(lambda m, x: m.k(m.l(x) - m.l(x).mean(0)), l=lin(), k=lin(seed=2))
    rows = native(model, spread(model(X)))
    answer = found(model, lambda: spread(model(X)), params=["l.weight"])
    return answer, {"l.weight": rows["l.weight"]}


def loss_scale() -> Pair:
    """Loss scaling is divided out."""
    model = two()
    with persample.record(model) as tape:
        tape.backward(spread(model(X)), scale=1024.0)
    return tape.grads(), native(model, spread(model(X)))


def under_no_grad() -> Pair:
    """Nothing to differentiate."""
    model = two()
    with torch.no_grad():
        return found(model, lambda: spread(model(X))), native(model, spread(model(X)))


def loop(body: Callable[..., Tensor], **parts: Any) -> Callable[[], Pair]:
    """Mixing samples with unproven="loop": the rows of the native graph."""

    def run() -> Pair:
        model = Net(body, **parts)
        return both(model, lambda: seeded_rows(model), unproven="loop")

    return run


def half_opaque(m: nn.Module, x: Tensor) -> Tensor:
    """One use with a rule, one without."""
    return m.l(x) + torch.linalg.solve(m.w, x.T).T


def seeded_rows(model: nn.Module) -> Tensor:
    """The default loss after setting the seed."""
    torch.manual_seed(5)
    return row_losses(model, (X,))


def frozen_model() -> Pair:
    """Nothing is trainable."""
    model = two().requires_grad_(False)
    with persample.record(model) as tape:
        tape.backward(spread(model(X)))
    return tape.grads(), {}


def lone_tokens() -> Pair:
    """The oracle of the package itself, on tokens."""
    model = nn.Sequential(seeded(nn.Embedding(N, N)), lin())
    loss = lambda m, b: spread(m(b[0]))
    return found(model, lambda: loss(model, (ints(N, N),))), oracle(model, loss, (ints(N, N),))


def clipped(losses_of: Callable[[nn.Module], Tensor]) -> Callable[[], Pair]:
    """Clip losses that look at the whole batch without a gradient: must be refused."""

    def run() -> Pair:
        model = two()
        with persample.record(model) as tape:
            tape.backward(losses_of(model))
        tape.grads()
        return tape.clipped_sum(1.0), {}

    return run


def ranked(model: nn.Module) -> Tensor:
    """Losses weighted by their rank."""
    return spread(model(X)).sort()[0] * torch.arange(1.0, N + 1)


def hardest(model: nn.Module) -> Tensor:
    """The largest losses of the batch."""
    return spread(model(X)).topk(2)[0]


def hardest_by_index(model: nn.Module) -> Tensor:
    """The same, chosen by index."""
    losses = spread(model(X))
    return losses[losses.detach().argsort()[2:]]


def alive(model: nn.Module) -> Tensor:
    """Only features that are large on the whole."""
    out = model(X)
    return out[:, out.detach().sum(0) > -1].sum(1)


CHOICES: dict[str, tuple[str, Callable[[], Pair]]] = {
    "cached before the block": (EITHER, cached_outside),
    "cached before the block, partly": (EITHER, cached_partly),
    "cached between blocks": (EITHER, cached_between),
    "foreign parameter": (EXACT, foreign_parameter),
    "foreign mixing": (REFUSED, foreign_mixing),
    "parameter replaced": (EITHER, replaced_parameter),
    "parameter frozen inside": (EITHER, frozen_inside),
    "some parameters": (EXACT, some_parameters),
    "mixing before the parameter": (EITHER, mixing_before_chosen),
    "mixing after the parameter": (REFUSED, mixing_after_chosen),
    "loss scale": (EXACT, loss_scale),
    "no_grad": (REFUSED, under_no_grad),
    "frozen model": (EITHER, frozen_model),
    "tokens": (EXACT, lone_tokens),
    "clip ranked losses": (REFUSED, clipped(ranked)),
    "clip the hardest": (REFUSED, clipped(hardest)),
    "clip the hardest by index": (REFUSED, clipped(hardest_by_index)),
    "clip of features chosen by the batch": (REFUSED, clipped(alive)),
    "loop: mean": (EXACT, loop(lambda m, x: m.l(x) - m.l(x).mean(0), l=lin())),
    "loop: transposed": (EXACT, loop(lambda m, x: m.l(x).T, l=lin())),
    "loop: batch norm": (
        EXACT,
        loop(lambda m, x: m.b(m.l(x)), l=lin(), b=seeded(nn.BatchNorm1d(N))),
    ),
    "loop: half opaque": (
        EXACT,
        loop(half_opaque, l=lin(), w=rand(N, N, seed=6)),
    ),
    "loop: dropout": (EXACT, loop(lambda m, x: F.dropout(m.l(x)).cumsum(0), l=lin())),
}


def scripts() -> Iterator[Script]:
    """All of this file."""
    for name, (expectation, run) in CHOICES.items():
        yield Script(f"order: {name}", run, expectation)
