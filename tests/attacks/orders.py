"""Attacks by the order of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import persample

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    N,
    Net,
    Script,
    lin,
    rand,
    spread,
)
from .rows import CUBE, Pair, X, Y, both, native, two


def after_block() -> Pair:
    """Backward after the block."""
    model = two()
    with persample.record(model) as tape:
        losses = spread(model(X))
    tape.backward(losses)
    return tape.grads(), native(model, spread(model(X)))


def backward_twice() -> Pair:
    """Two losses of one output: accumulated or refused."""
    model = two()
    with persample.record(model) as tape:
        out = model(X)
        tape.backward(spread(out), retain_graph=True)
        tape.backward(out.square().sum(1))
    return tape.grads(), native(model, spread(model(X)) + model(X).square().sum(1))


def interleaved() -> Pair:
    """Forward A, forward B, backward A, backward B, on one tape."""
    model = two()
    with persample.record(model) as tape:
        a, b = spread(model(X)), spread(model(Y))
        tape.backward(a)
        tape.backward(b)
    return tape.grads(), native(model, spread(model(X)) + spread(model(Y)))


def one_of_two() -> Pair:
    """Two forwards, one backward."""
    model = two()
    with persample.record(model) as tape:
        _, b = spread(model(X)), spread(model(Y))
        tape.backward(b)
    return tape.grads(), native(model, spread(model(Y)))


def two_tapes() -> Pair:
    """Two recordings; the first one's backward comes last."""
    model = two()
    with persample.record(model) as first:
        a = spread(model(X))
    with persample.record(model) as second:
        second.backward(spread(model(Y)))
    first.backward(a)
    joined = {f"a.{k}": g for k, g in first.grads().items()}
    joined |= {f"b.{k}": g for k, g in second.grads().items()}
    wanted = {f"a.{k}": g for k, g in native(model, spread(model(X))).items()}
    wanted |= {f"b.{k}": g for k, g in native(model, spread(model(Y))).items()}
    return joined, wanted


def nested_tapes() -> Pair:
    """A recording inside a recording."""
    model = two()
    with persample.record(model) as outer:
        a = spread(model(X))
        with persample.record(model) as inner:
            inner.backward(spread(model(Y)))
        outer.backward(a)
    return outer.grads(), native(model, spread(model(X)))


def nested_models() -> Pair:
    """A recording of a part inside the recording of the whole."""
    model = two()
    with persample.record(model) as outer:
        with persample.record(model.k) as inner:
            losses = spread(model(X))
        outer.backward(losses)
        del inner
    return outer.grads(), native(model, spread(model(X)))


def crossed_tapes() -> Pair:
    """The losses of one recording given to another."""
    model = two()
    with persample.record(model) as first:
        losses = spread(model(X))
    with persample.record(model) as second:
        model(Y)
        second.backward(losses)
    del first
    return second.grads(), native(model, spread(model(X)))


def several_forwards() -> Pair:
    """The same samples twice."""
    model = two()
    return both(model, lambda: spread(model(X)) + spread(model(X * 2)))


def other_samples() -> Pair:
    """A second batch whose samples are others: row i of both count as sample i."""
    model = two()
    return both(model, lambda: spread(model(X)) * spread(model(Y)))


def other_size() -> Pair:
    """A second batch of another size."""
    model = two()
    return both(model, lambda: spread(model(X)) + spread(model(Y[:2])).sum())


def fed_back() -> Pair:
    """The model's own output is its next input."""
    model = two()
    return both(model, lambda: spread(model(model(X))))


def fed_back_crossed() -> Pair:
    """The model's own output, in another order, is its next input."""
    model = two()
    return both(model, lambda: spread(model(X) * model(model(X).flip(0))))


def fed_back_transposed() -> Pair:
    """The model's own output, transposed, is its next input: it has n rows too."""
    model = two()
    return both(model, lambda: spread(model(model(X).T)))


def fed_back_mixed() -> Pair:
    """The model's own output, mixed over samples, is its next input."""
    model = two()
    return both(model, lambda: spread(model(model(X).softmax(0))))


def hidden_state() -> Pair:
    """A state carried between calls."""
    model = Net(lambda m, x, s: torch.tanh(m.l(x) + m.k(s)), l=lin(), k=lin(seed=2))

    def losses() -> Tensor:
        state = torch.zeros(N, N, dtype=torch.float64)
        for step in range(N):
            state = model(CUBE[:, step], state)
        return spread(state)

    return both(model, losses)


def exception_first() -> Pair:
    """A forward that fails, then a fresh recording."""
    model = two()
    try:
        with persample.record(model) as tape:
            model(X)
            raise ValueError
    except ValueError:
        pass
    del tape
    return both(model, lambda: spread(model(X)))


def failed_backward_first() -> Pair:
    """A refused backward, then a right one on the same tape."""
    model = two()
    with persample.record(model) as tape:
        out = model(X)
        try:
            tape.backward(spread(out.T), retain_graph=True)
        except persample.PersampleError:
            pass
        tape.backward(spread(out))
    return tape.grads(), native(model, spread(model(X)))


def evaluation_between() -> Pair:
    """A forward of other data without gradients inside the block."""
    model = two()
    with persample.record(model) as tape:
        losses = spread(model(X))
        with torch.no_grad():
            model(rand(7, N))
        tape.backward(losses)
    return tape.grads(), native(model, spread(model(X)))


def evaluation_first() -> Pair:
    """A forward of fewer data, first."""
    model = two()
    with persample.record(model) as tape:
        with torch.no_grad():
            model(rand(7, N))
        tape.backward(spread(model(X)))
    return tape.grads(), native(model, spread(model(X)))


def micro_batches() -> Pair:
    """Gradient accumulation over two halves inside one block."""
    model = two()
    with persample.record(model) as tape:
        for half in X.chunk(2):
            tape.backward(spread(model(half)))
    each = native(model, spread(model(X)))
    return tape.grads(), {k: g[:2] + g[2:] for k, g in each.items()}


ORDERS: dict[str, tuple[str, Callable[[], Pair]]] = {
    "backward after the block": (EXACT, after_block),
    "two backwards": (EITHER, backward_twice),
    "forward A B, backward A B": (EITHER, interleaved),
    "two forwards, one backward": (EXACT, one_of_two),
    "two tapes, crossed in time": (EXACT, two_tapes),
    "tape in a tape": (EITHER, nested_tapes),
    "tape of a part in a tape": (EITHER, nested_models),
    "losses of another tape": (REFUSED, crossed_tapes),
    "several forwards": (EXACT, several_forwards),
    "two batches, row by row": (EITHER, other_samples),
    "two batches of different sizes": (EITHER, other_size),
    "fed back": (EXACT, fed_back),
    "fed back, crossed": (REFUSED, fed_back_crossed),
    "fed back, transposed": (REFUSED, fed_back_transposed),
    "fed back, mixed": (REFUSED, fed_back_mixed),
    "hidden state": (EXACT, hidden_state),
    "exception, then fresh": (EXACT, exception_first),
    "refused backward, then right": (EITHER, failed_backward_first),
    "evaluation between": (EXACT, evaluation_between),
    "evaluation first": (EITHER, evaluation_first),
    "micro batches": (EITHER, micro_batches),
}


def scripts() -> Iterator[Script]:
    """All of this file."""
    for name, (expectation, run) in ORDERS.items():
        yield Script(f"order: {name}", run, expectation)
