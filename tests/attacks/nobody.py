"""Attacks by rows that no sample wrote: a buffer of zeros, filled where a mask holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from .base import EITHER, EXACT, Case, N, Net, Script, case, lin, rand, spread
from .inner import entered, slope
from .rows import Pair, X, scaled

ORDERS = ((0, 1, 2, 3), (3, 1, 2, 0), (0, 1, 3, 2), (1, 2, 3, 0), (2, 3, 0, 1))
WEIGHTS = torch.arange(1.0, N + 1, dtype=torch.float64)[:, None]


def filled(mask: Sequence[int], order: Sequence[int], end: str) -> Callable[..., Tensor]:
    """Samples in another order, some of them written to zeros, a parameter, and back."""
    chosen, places = torch.tensor(mask).bool(), torch.tensor(order)

    def body(m: Any, x: Tensor) -> Tensor:
        h = m.l(x)[places]
        out = torch.zeros_like(h)
        out[chosen] = m.k(h[chosen])
        y = m.j(out) if end == "layer" else out + m.b
        return y[places.argsort()] * WEIGHTS

    return body


def pushed(mask: Sequence[int], order: Sequence[int], by: str) -> Callable[..., Tensor]:
    """The gradient of an energy, through rows that some samples did not write or by them."""
    chosen, places = torch.tensor(mask).bool(), torch.tensor(order)

    def body(m: Any, x: Tensor) -> Tensor:
        x = entered(x)
        h = m.l(x)[places]
        out = torch.zeros_like(h)
        out[chosen] = m.k(h[chosen])
        energy = (h + m.j(out).tanh() + m.b)[places.argsort()].square()
        force = slope(energy, x if by == "the samples" else out)
        return energy + m.k(force)

    return body


def parts() -> dict[str, Any]:
    return {"l": lin(), "k": lin(seed=3), "j": lin(seed=9), "b": rand(N)}


def cases() -> Iterator[Case]:
    """One loss per sample: exact where nothing was permuted and two samples have rows."""
    for mask, order, end in product(product((0, 1), repeat=N), ORDERS, ("layer", "added")):
        plain = order == ORDERS[0] and sum(mask) > 1
        name = f"nobody: rows of {mask} in order {order}, {end}"
        yield case(name, EXACT if plain else EITHER, filled(mask, order, end), **parts())
    for mask, order, by in product(product((0, 1), repeat=N), ORDERS, ("the samples", "the rows")):
        right = by == "the samples" and (sum(mask) > 1 or not sum(mask)) and order == ORDERS[0]
        name = f"nobody: a gradient by {by} of {mask} in order {order}"
        yield case(name, EXACT if right else EITHER, pushed(mask, order, by), **parts())
    yield case("nobody: losses of some samples are constants", EXACT, some_losses, **parts())
    yield case("nobody: rows in a cube of zeros, then a layer", EXACT, rows_of_some,
               rand(N, 3, N), **parts())  # fmt: skip


def some_losses(m: Any, x: Tensor) -> Tensor:
    """Token losses added up by sample, where two samples have no token."""
    rows = torch.tensor([1, 1, 2])
    return torch.zeros(N, dtype=x.dtype).index_add(0, rows, spread(m.k(m.l(x)[rows])))


def rows_of_some(m: Any, x: Tensor) -> Tensor:
    """Tokens of three of the samples, with places for all."""
    flat = m.l(x).reshape(-1, N)
    rows = torch.tensor([0, 4, 5, 10])
    return m.j(torch.zeros_like(flat).index_copy(0, rows, m.k(flat[rows]))).view_as(x)


def summed(mask: Sequence[int], order: Sequence[int]) -> Pair:
    """The sum of all losses: which of them are whose must not be guessed."""
    model: nn.Module = Net(filled(mask, order, "added"), **parts())

    def other() -> Tensor:
        return (model.l(X) * 0).sum()

    return scaled(model, lambda: spread(model(X)).sum() + other(), lambda: spread(model(X)))


def scripts() -> Iterator[Script]:
    """The same, back-propagated as one number."""
    for mask, order in product(product((0, 1), repeat=N), ORDERS):
        if any(mask):
            name = f"nobody: the sum of rows of {mask} in order {order}"
            run = lambda mask=mask, order=order: summed(mask, order)
            yield Script(name, run, EXACT if all(mask) else EITHER)
