"""Samples taken apart in Python: one call or one loss each, put side by side or added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample

from .base import EXACT, REFUSED, Script, lin, seeded, spread
from .rows import Pair, X, both, found, native, scaled, two

LABELS = torch.tensor([1, 3, 1, 0])


def numbers(out: Tensor) -> list[Tensor]:
    """One loss of no axis per sample."""
    return [F.cross_entropy(row, label) for row, label in zip(out, LABELS, strict=True)]


def running(out: Tensor) -> Tensor:
    """``total += loss``."""
    total = torch.zeros((), dtype=torch.float64)
    for number in numbers(out):
        total += number
    return total


def twice_counted(out: Tensor) -> Tensor:
    """Sample 0 is given a loss of sample 1 besides its own."""
    first, second, *rest = numbers(out)
    return torch.stack([first + second, second, *rest])


def poured(out: Tensor) -> Tensor:
    """The same, in place."""
    bins = torch.zeros(4, dtype=torch.float64)
    for place, number in zip((0, 0, 1, 2), numbers(out), strict=True):
        bins[place] += number
    return bins


VECTORS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "stacked numbers": (EXACT, lambda out: torch.stack([row.square().sum() for row in out])),
    "stacked means": (EXACT, lambda out: torch.stack(numbers(out))),
    "stacked squares": (
        EXACT,
        lambda out: torch.stack([F.mse_loss(row, torch.ones_like(row)) for row in out]),
    ),
    "hstack of numbers": (EXACT, lambda out: torch.hstack(numbers(out))),
    "one sample's loss beside another's": (REFUSED, twice_counted),
    "one sample's loss beside another's, in place": (REFUSED, poured),
    "plus a sum of numbers": (REFUSED, lambda out: spread(out) + sum(numbers(out))),
    "plus a sum of numbers, detached": (
        REFUSED,
        lambda out: spread(out) + torch.as_tensor(sum(numbers(out))).detach(),
    ),
    "mse of two samples": (
        REFUSED,
        lambda out: torch.stack([F.mse_loss(out[k], out[k - 1]) for k in range(4)]),
    ),
}
SCALARS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "sum of numbers": (EXACT, lambda out: torch.as_tensor(sum(numbers(out)))),
    "running sum of numbers": (EXACT, running),
    "exp of a sum of numbers": (REFUSED, lambda out: torch.as_tensor(sum(numbers(out))).exp()),
    "product of sums of numbers": (REFUSED, lambda out: running(out) * running(out)),
}


def of_batch(cut: Callable[[Tensor], list[Tensor]], *, marked: bool) -> Callable[[], Pair]:
    """One call for every piece of a batch; without a mark nobody says whose pieces they are."""

    def run() -> Pair:
        model, batch = two(), X.clone()
        losses_of = lambda: torch.cat([spread(model(piece)) for piece in cut(batch)])
        if not marked:
            return both(model, losses_of)
        with persample.record(model) as tape:
            tape.mark(batch)
            tape.backward(losses_of())
        return tape.grads(), native(model, losses_of())

    return run


def rows_in_turn() -> Pair:
    """One row after the other of a marked batch, without its axis."""
    model, batch = two(), X.clone()
    losses_of = lambda: torch.stack([model(row).square().sum() for row in batch])
    with persample.record(model) as tape:
        tape.mark(batch)
        tape.backward(losses_of())
    return tape.grads(), native(model, losses_of())


def one_step(**options: int) -> Callable[[], Pair]:
    """A recurrent layer's input (time, samples, features) of one time step."""

    def run() -> Pair:
        model = seeded(nn.LSTM(4, 4))
        losses_of = lambda: model(X[None])[0][0].square().sum(1)
        return both(model, losses_of, **options)

    return run


def tokens_of_one() -> Pair:
    """One text, a loss for every token: several losses of one sample."""
    model, text = nn.Sequential(seeded(nn.Embedding(4, 4)), lin()), LABELS[None]
    losses_of = lambda: F.cross_entropy(model(text)[0], LABELS, reduction="none")
    return found(model, losses_of), {
        k: g.sum(0, keepdim=True) for k, g in native(model, losses_of()).items()
    }


PIECES: dict[str, tuple[str, Callable[[], Pair]]] = {
    "rows of a marked batch": (EXACT, of_batch(lambda x: list(x.split(1)), marked=True)),
    "halves of a marked batch": (EXACT, of_batch(lambda x: list(x.chunk(2)), marked=True)),
    "rows of a batch": (REFUSED, of_batch(lambda x: list(x.split(1)), marked=False)),
    "halves of a batch": (REFUSED, of_batch(lambda x: list(x.chunk(2)), marked=False)),
    "vectors of a marked batch": (EXACT, rows_in_turn),
    "one time step": (REFUSED, one_step()),
    "one time step, told": (EXACT, one_step(dim=1)),
    "tokens of one text": (EXACT, tokens_of_one),
}


def _vector(function: Callable[[Tensor], Tensor]) -> Callable[[], Pair]:
    def run() -> Pair:
        model: nn.Module = two()
        return both(model, lambda: function(model(X)))

    return run


def _scalar(function: Callable[[Tensor], Tensor]) -> Callable[[], Pair]:
    def run() -> Pair:
        model: nn.Module = two()
        return scaled(model, lambda: function(model(X)), lambda: torch.stack(numbers(model(X))))

    return run


def scripts() -> Iterator[Script]:
    """All of this file."""
    for name, (expectation, function) in VECTORS.items():
        yield Script(f"pieces: {name}", _vector(function), expectation)
    for name, (expectation, function) in SCALARS.items():
        yield Script(f"pieces: {name}", _scalar(function), expectation)
    for name, (expectation, run) in PIECES.items():
        yield Script(f"pieces: {name}", run, expectation)
