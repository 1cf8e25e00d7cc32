"""Attacks by what a program does to a model and its tensors around one recorded step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import persample

from .base import EITHER, EXACT, REFUSED, N, Net, Rows, Script, lin, rand, seeded, spread
from .rows import Pair, X, native, two

Act = Callable[[nn.Module, Tensor, Tensor], Any]  # model, its output, its losses
LEAN: dict[str, Any] = {"lean": True}
LABELS = torch.tensor([1, 3, 1, 0])


class Noisy(torch.autograd.Function):
    """Adds random numbers to what passes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad + torch.randn_like(grad)


class Product(torch.autograd.Function):
    """A custom function of data and weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad @ w.T.double(), x.T @ grad


def derived() -> nn.Module:
    """A weight that is computed from parameters."""
    return Net(lambda m, x: m.k((x @ m.w.tanh()).tanh()), w=rand(N, N, seed=6), k=lin(seed=2))


def by_function() -> nn.Module:
    """A derived weight given to a custom function."""
    return Net(lambda m, x: Product.apply(x, m.w * 2), w=rand(N, N, seed=6))


def mixing() -> nn.Module:
    """Answered one loss at a time only."""
    return Net(lambda m, x: m.l(x) - m.l(x).mean(0), l=lin())


def around(
    act: Act, made: Callable[[], nn.Module] = derived, *, before: bool = False, **options: Any
) -> Callable[[], Pair]:
    """Do something between forward and backward, or between backward and the question."""

    def run() -> Pair:
        model = made()
        rows = native(model, spread(model(X)))
        with persample.record(model, **options) as tape:
            out = model(X)
            losses = spread(out)
            if before:
                act(model, out, losses)
            tape.backward(losses)
        if not before:
            act(model, out, losses)
        return tape.grads(), rows

    return run


def convert(model: nn.Module, out: Tensor, losses: Tensor) -> None:
    """Another dtype."""
    model.float()


def freeze(model: nn.Module, out: Tensor, losses: Tensor) -> None:
    """As in the other half of an adversarial step."""
    model.requires_grad_(False)


def hook_parameters(model: nn.Module, out: Tensor, losses: Tensor) -> None:
    """For the next, plain step."""
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 0)


def set_first(model: nn.Module, out: Tensor, losses: Tensor) -> None:
    """Write one loss over another."""
    losses[0] = losses[1] * 7


AROUND: dict[str, tuple[str, Callable[[], Pair]]] = {
    "converted before backward": (REFUSED, around(convert, before=True)),
    "converted before backward, lean": (REFUSED, around(convert, before=True, **LEAN)),
    "converted before backward, function": (REFUSED, around(convert, by_function, before=True)),
    "converted before backward, loop": (
        REFUSED,
        around(convert, mixing, before=True, unproven="loop"),
    ),
    "converted before the question": (REFUSED, around(convert)),
    "frozen before backward": (EXACT, around(freeze, before=True)),
    "frozen before backward, lean": (EXACT, around(freeze, before=True, **LEAN)),
    "frozen before backward, function": (EXACT, around(freeze, by_function, before=True)),
    "frozen before backward, loop": (EXACT, around(freeze, mixing, before=True, unproven="loop")),
    "frozen before backward, verified": (EXACT, around(freeze, before=True, verify=True)),
    "frozen before the question": (EXACT, around(freeze)),
    "frozen before the question, lean": (EXACT, around(freeze, **LEAN)),
    "parameters hooked before the question": (REFUSED, around(hook_parameters)),
    "parameters hooked before the question, lean": (REFUSED, around(hook_parameters, **LEAN)),
    "parameters hooked, none derived": (EXACT, around(hook_parameters, two)),
    "parameters hooked, none derived, lean": (EXACT, around(hook_parameters, two, **LEAN)),
    "losses divided in place": (EXACT, around(lambda m, o, v: v.div_(N), **LEAN)),
    "losses written to": (EXACT, around(set_first, **LEAN)),
    "losses detached in place": (EXACT, around(lambda m, o, v: v.detach_(), **LEAN)),
    "losses reshaped in place": (EXACT, around(lambda m, o, v: v.unsqueeze_(0), **LEAN)),
    "losses hooked": (REFUSED, around(lambda m, o, v: v.register_hook(lambda g: 2 * g), **LEAN)),
    "output hooked": (REFUSED, around(lambda m, o, v: o.register_hook(lambda g: 2 * g), **LEAN)),
    "output hooked, nothing runs again": (
        EXACT,
        around(lambda m, o, v: o.register_hook(lambda g: 2 * g)),
    ),
}


def refilled(
    body: Callable[..., Tensor], how: Callable[[Tensor], Any], **options: Any
) -> Callable[[], Pair]:
    """A constant of the model is refilled before the question; no version counter tells."""

    def run() -> Pair:
        model = Net(body, w=rand(N, N, seed=6), c=nn.Buffer(rand(N, N, seed=7)))
        rows = native(model, spread(model(X)))
        with persample.record(model, **options) as tape:
            tape.backward(spread(model(X)))
        how(model.c)
        return tape.grads(), rows

    return run


def labelled(**options: Any) -> Callable[[], Pair]:
    """The labels' memory is refilled with the next batch's."""

    def run() -> Pair:
        model, labels = two(), LABELS.clone()
        losses = lambda y: F.cross_entropy(model(X), y, reduction="none")
        rows = native(model, losses(LABELS))
        with persample.record(model, **options) as tape:
            tape.backward(losses(labels))
        by_numpy(labels)
        return tape.grads(), rows

    return run


def by_numpy(tensor: Tensor) -> None:
    """What a loader with buffers of its own does."""
    tensor.numpy()[...] = tensor.numpy()[::-1].copy()


def by_data(tensor: Tensor) -> None:
    """What moving averages of code books often do."""
    tensor.data.copy_(tensor.flip(0))


REFILLED: dict[str, tuple[str, Callable[[], Pair]]] = {
    "mask of a weight": (REFUSED, refilled(lambda m, x: x @ (m.w * m.c), by_numpy)),
    "mask of a weight, .data": (REFUSED, refilled(lambda m, x: x @ (m.w * m.c), by_data)),
    "mask of a weight, lean": (REFUSED, refilled(lambda m, x: x @ (m.w * m.c), by_numpy, **LEAN)),
    "third factor": (
        EXACT,
        refilled(lambda m, x: torch.einsum("ni,ij,jk->nk", x, m.w, m.c), by_numpy),
    ),
    "second argument": (REFUSED, refilled(lambda m, x: torch.inner(x, m.w * m.c), by_data)),
    "second argument, read at once": (
        EXACT,
        refilled(lambda m, x: torch.addcmul(x, m.w, m.c), by_data),
    ),
    "behind the parameters": (EXACT, refilled(lambda m, x: torch.cdist(x @ m.w, m.c), by_numpy)),
    "behind the parameters, lean": (
        REFUSED,
        refilled(lambda m, x: torch.cdist(x @ m.w, m.c), by_numpy, **LEAN),
    ),
    "labels": (EXACT, labelled()),
    "labels, lean": (REFUSED, labelled(**LEAN)),
}


def twice(body: Callable[..., Tensor], **options: Any) -> Callable[[], Pair]:
    """No answer is the right one, but all must be of the same gradients: no sample above C."""

    def run() -> Pair:
        torch.manual_seed(0)
        model = Net(body, l=lin(), k=lin(seed=2))
        with persample.record(model, **options) as tape:
            tape.backward(spread(model(X)), retain_graph=True)
        norms, rows = tape.norms(), tape.grads()
        total = sum(row.flatten(1).square().sum(1) for row in rows.values())
        return {"norms": norms}, {"norms": torch.as_tensor(total).sqrt()}

    return run


def hooked(m: nn.Module, x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    """A hook on the way back."""
    hidden = m.l(x)
    hidden.register_hook(hook)
    return m.k(hidden.tanh())


def weight_hooked(m: nn.Module, x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    """A hook on a derived weight."""
    weight = m.l.weight * 1.5
    weight.register_hook(hook)
    return m.k((x @ weight).tanh())


def counting() -> Callable[[Tensor], Tensor]:
    """A hook that keeps a state."""
    calls: list[int] = []

    def hook(grad: Tensor) -> Tensor:
        calls.append(1)
        return grad * len(calls)

    return hook


def recomputed(m: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    """Dropout that is drawn anew in every recomputation."""
    inside = lambda a: F.dropout(m.l(a))
    x = x.clone().requires_grad_()
    hidden = checkpoint(inside, x, use_reentrant=reentrant, preserve_rng_state=False)
    return m.k(torch.as_tensor(hidden))


def shuffled(m: nn.Module, x: Tensor) -> Tensor:
    """A recomputation in which the samples have other places."""

    def inside(a: Tensor) -> Tensor:
        order = torch.randperm(N)
        return m.l(a[order])[order.argsort()]

    return m.k(checkpoint(inside, x, use_reentrant=False, preserve_rng_state=False).tanh())


def noise(grad: Tensor) -> Tensor:
    """A hook that draws random numbers."""
    return grad + torch.randn_like(grad)


NOISY = functools.partial(hooked, hook=noise)
NOISY_WEIGHT = functools.partial(weight_hooked, hook=noise)
TWICE: dict[str, tuple[str, Callable[[], Pair]]] = {
    "random hook": (EXACT, twice(NOISY)),
    "random hook, lean": (REFUSED, twice(NOISY, **LEAN)),
    "counting hook, lean": (REFUSED, twice(lambda m, x: hooked(m, x, counting()), **LEAN)),
    "clipping hook, lean": (
        EXACT,
        twice(lambda m, x: hooked(m, x, lambda g: F.normalize(g, dim=1)), **LEAN),
    ),
    "random function, lean": (REFUSED, twice(lambda m, x: m.k(Noisy.apply(m.l(x))), **LEAN)),
    "random hook of a weight": (REFUSED, twice(NOISY_WEIGHT)),
    "random hook of a weight, lean": (REFUSED, twice(NOISY_WEIGHT, **LEAN)),
    "counting hook of a weight": (REFUSED, twice(lambda m, x: weight_hooked(m, x, counting()))),
    "random function of a weight": (
        REFUSED,
        twice(lambda m, x: m.k(x @ Noisy.apply(m.l.weight))),
    ),
    "drawn anew": (EITHER, twice(functools.partial(recomputed, reentrant=False))),
    "drawn anew, lean": (REFUSED, twice(functools.partial(recomputed, reentrant=False), **LEAN)),
    "drawn anew, reentrant, lean": (
        REFUSED,
        twice(functools.partial(recomputed, reentrant=True), **LEAN),
    ),
    "shuffled anew": (REFUSED, twice(shuffled)),
}


def remade(change: Callable[[nn.Module], Any]) -> Callable[[], Pair]:
    """The model gets other parameters inside the block."""

    def run() -> Pair:
        model = Net(lambda m, x: m.k(m.l(x).tanh()) * m.e, l=lin(), k=lin(seed=2), e=rand(N))
        model.e.requires_grad_(False)
        with persample.record(model) as tape:
            change(model)
            tape.backward(spread(model(X)))
        return tape.grads(), native(model, spread(model(X)))

    return run


def appended(model: nn.Module) -> None:
    """A layer more."""
    model.k = nn.Sequential(model.k, seeded(nn.Linear(N, N), 5))


def replaced(model: nn.Module) -> None:
    """Another layer by the same name."""
    model.k = seeded(nn.Linear(N, N), 5)


REMADE: dict[str, tuple[str, Callable[[], Pair]]] = {
    "layer appended": (REFUSED, remade(appended)),
    "layer replaced": (EITHER, remade(replaced)),
    "parameter unfrozen": (REFUSED, remade(lambda m: m.e.requires_grad_())),
    "parameter added": (REFUSED, remade(lambda m: setattr(m, "e", nn.Parameter(rand(N))))),
}


def ids_rewritten(*, marked: bool) -> Pair:
    """The caller goes on to use the memory of the ids."""
    model, ids = two(), torch.tensor([2, 0, 3, 1])
    rows, order = native(model, spread(model(X))), ids.argsort()
    options = {} if marked else {"sample_ids": ids}
    with persample.record(model, n=N, **options) as tape:
        x = tape.mark(X.clone(), ids=ids) if marked else X
        losses = spread(model(x))
        ids.zero_()
        tape.backward(losses)
    return tape.grads(), {k: g[order] for k, g in rows.items()}


def overlapping_buffer() -> Pair:
    """Windows of one line of memory as buffer."""
    model = Net(lambda m, x: x * m.w, w=rand(N))
    rows: Rows = native(model, spread(model(X)))
    with persample.record(model) as tape:
        tape.backward(spread(model(X)))
    windows = rand(2 * N).as_strided((N, N), (1, 1))
    return tape.grads(out={"w": windows}), rows


def small_coefficients() -> Pair:
    """Coefficients of eight bits."""
    model = two()
    rows = native(model, spread(model(X)))
    with persample.record(model) as tape:
        tape.backward(spread(model(X)))
    c = torch.tensor([1.0, 0.5, 2.0, 0.25])
    found = tape.weighted_sum(c.to(torch.float8_e4m3fn))
    return found, {k: torch.einsum("n,n...->...", c.double(), g) for k, g in rows.items()}


OTHERS: dict[str, tuple[str, Callable[[], Pair]]] = {
    "sample ids rewritten": (EXACT, lambda: ids_rewritten(marked=False)),
    "marked ids rewritten": (EXACT, lambda: ids_rewritten(marked=True)),
    "overlapping buffer": (REFUSED, overlapping_buffer),
    "eight-bit coefficients": (EXACT, small_coefficients),
}


def scripts() -> Iterator[Script]:
    """All of this file."""
    tables = {
        "around": AROUND,
        "refilled": REFILLED,
        "twice": TWICE,
        "remade": REMADE,
        "memory": OTHERS,
    }
    for prefix, table in tables.items():
        for name, (expectation, run) in table.items():
            yield Script(f"{prefix}: {name}", run, expectation)
