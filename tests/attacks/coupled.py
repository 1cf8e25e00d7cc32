"""Attacks by constants that are none: numbers of the whole batch under another name.

Each of them weighs the samples' outputs. Where a number is of the whole batch no clipped sum may
come out; where it is the sample's own, gradients are exact. Behind writes that leave a part of a
tensor as it was, a second way to the loss hides what the first one lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import persample

from .base import EITHER, EXACT, REFUSED, Case, N, Net, Script, Table, lin, on_module, rand, spread
from .rows import Pair, native

Weigh = Callable[[Tensor], Tensor]
F64 = torch.float64
COUNT = torch.arange(1.0, N + 1, dtype=F64)


def ranks(h: Tensor) -> Tensor:
    """The order of the samples by one feature."""
    return h[:, 0].argsort()


def best(h: Tensor) -> Tensor:
    """The two largest samples."""
    return h[:, 0].topk(2)[1]


def written(h: Tensor) -> Tensor:
    """Ranks by writing, as users compute them."""
    out = torch.empty(N, dtype=torch.long)
    out[ranks(h)] = torch.arange(N)
    return out[:, None].double()


def picked(h: Tensor) -> Tensor:
    """A mask of the largest samples."""
    mask = torch.zeros(N, dtype=torch.bool)
    mask[best(h)] = True
    return mask[:, None].double()


WEIGHTS: dict[str, tuple[str, Weigh]] = {
    "tensor of a number": (REFUSED, lambda h: torch.tensor(h.mean())),
    "tensor of a list": (REFUSED, lambda h: torch.tensor([h[1, 0], 1.0, 2.0, 3.0], dtype=F64)),
    "tensor of nested lists": (REFUSED, lambda h: torch.tensor([[h[1, 0]]] * N, dtype=F64)),
    "as_tensor of a list": (REFUSED, lambda h: torch.as_tensor([h[1, 0], 1.0, 2.0, 3.0])),
    "tensor of others": (REFUSED, lambda h: torch.tensor(h).flip(0)),
    "tensor of a count": (REFUSED, lambda h: torch.tensor((h > 0).sum())),
    "full": (REFUSED, lambda h: torch.full((N, 1), h[0, 0])),
    "like what is mixed": (
        EXACT,
        lambda h: h * (torch.ones_like(h - h.mean(0)) + (h - h.mean(0)).new_full((1,), 2)),
    ),
    "like what is mixed, filled": (REFUSED, lambda h: torch.full_like(h - h.mean(0), h.mean())),
    "like a mean, filled with it": (REFUSED, lambda h: h * torch.full_like(h.mean(), h.mean())),
    "like what is mixed, written to": (
        REFUSED,
        lambda h: h * torch.zeros_like(h - h.mean(0)).copy_(h - h.mean(0)),
    ),
    "full_like": (REFUSED, lambda h: torch.full_like(h, h.mean())),
    "full_like of one sample": (REFUSED, lambda h: torch.full_like(h, h[0, 0])),
    "new_full": (REFUSED, lambda h: h.new_full((N, 1), h[0, 0])),
    "scalar_tensor": (REFUSED, lambda h: torch.scalar_tensor(h[0, 0], dtype=F64)),
    "linspace": (REFUSED, lambda h: torch.linspace(0.0, h[1, 0], N, dtype=F64)),
    "constants by rank": (REFUSED, lambda h: COUNT[ranks(h)][:, None]),
    "gathered by rank": (REFUSED, lambda h: COUNT.gather(0, ranks(h))[:, None]),
    "taken by rank": (REFUSED, lambda h: COUNT.take(ranks(h))[:, None]),
    "looked up by rank": (REFUSED, lambda h: F.embedding(ranks(h), COUNT[:, None])),
    "put by rank": (REFUSED, lambda h: COUNT.put(ranks(h), COUNT)[:, None]),
    "copied by rank": (REFUSED, lambda h: COUNT.index_copy(0, ranks(h), COUNT)[:, None]),
    "ranks written": (REFUSED, written),
    "a mask of the largest": (REFUSED, picked),
    "index_fill of the largest": (REFUSED, lambda h: COUNT.index_fill(0, best(h), 0)[:, None]),
    "scattered to the largest": (REFUSED, lambda h: COUNT.scatter(0, best(h), 0.0)[:, None]),
    "repeated by a comparison": (
        REFUSED,
        lambda h: COUNT.repeat_interleave((h[:, 0] > h[:, 0].mean()).long() + 1)[:N, None],
    ),
    "its own, by tensor": (EXACT, lambda h: torch.tensor(h)),
    "its own, by a list": (EXACT, lambda h: torch.tensor([r.sum() for r in h])[:, None]),
    "its own, by lists": (EXACT, lambda h: torch.tensor([list(row) for row in h])),
    "a size": (EXACT, lambda h: torch.arange((h > -9).sum() // N)),
}


def clipped(weigh: Weigh) -> Pair:
    """A clipped sum of outputs that are weighed, as one row."""
    model, x = Net(lambda m, x: m.k(m.l(x)), l=lin(), k=lin(seed=3)), rand(N, N)
    with persample.record(model) as tape:
        hidden = model.l(x)
        tape.backward(spread(model.k(hidden) * weigh(hidden.detach())))
    hidden = model.l(x)
    rows = native(model, spread(model.k(hidden) * weigh(hidden.detach())))
    return {k: g[None] for k, g in tape.clipped_sum(1e6).items()}, {
        k: g.sum(0, keepdim=True) for k, g in rows.items()
    }


def beside_the_diagonal(h: Tensor) -> Tensor:
    """What ``fill_diagonal_`` leaves as it was."""
    out = h * 1.0
    out.fill_diagonal_(0.0)
    return out


TWO_WAYS: Table = {
    "diagonal of the rows": (EXACT, lambda m, x: m.k(beside_the_diagonal(m.l(x))) + m.l(x)),
    "diagonal of the columns": (
        REFUSED,
        lambda m, x: m.k(beside_the_diagonal(m.l(x).T)) + m.l(x),
    ),
    "largest samples filled": (
        REFUSED,
        lambda m, x: m.k(m.l(x).index_fill(0, best(m.l(x).detach()), 0.0)),
    ),
}


def chosen(m: Any, x: Tensor, holds: Weigh, *, grad: bool = False, turn: bool = False) -> Tensor:
    """A layer of each sample's values, or of the batch's mean where a condition does not hold."""
    h = m.l(x)
    mean = h.mean(0) if grad else h.detach().mean(0)
    return m.k(torch.where(~holds(h), mean, h) if turn else torch.where(holds(h), h, mean))


def both(m: Any, x: Tensor) -> Tensor:
    """The same call, once where all values are taken and once where some are not."""
    return chosen(m, x, lambda h: h > -99) + chosen(m, x, lambda h: h > 0)


BRANCHES: Table = {
    "taken everywhere": (EXACT, lambda m, x: chosen(m, x, lambda h: h > -99)),
    "taken everywhere, turned": (EXACT, lambda m, x: chosen(m, x, lambda h: h > -99, turn=True)),
    "taken by a constant": (EXACT, lambda m, x: chosen(m, x, lambda h: torch.tensor(True))),
    "taken nearly everywhere": (REFUSED, lambda m, x: chosen(m, x, lambda h: h > h.min())),
    "not taken for one sample": (
        REFUSED, lambda m, x: chosen(m, x, lambda h: torch.arange(N)[:, None] > 0)),
    "not taken": (REFUSED, lambda m, x: chosen(m, x, lambda h: h < -99)),
    "taken as the batch says": (REFUSED, lambda m, x: chosen(m, x, lambda h: h > h.mean() - 99)),
    "with a gradient": (EITHER, lambda m, x: chosen(m, x, lambda h: h > -99, grad=True)),
    "taken, then not": (REFUSED, both),
}  # fmt: skip


def cases() -> Iterator[Case]:
    """Writes that leave a part as it was, and branches that are not taken."""
    for name, table in (("coupled", TWO_WAYS), ("branch", BRANCHES)):
        yield from on_module(name, table, rand(N, N), l=lin(), k=lin(seed=3))


def scripts() -> Iterator[Script]:
    """Weights."""
    for name, (expectation, weigh) in WEIGHTS.items():
        yield Script(f"coupled: {name}", lambda weigh=weigh: clipped(weigh), expectation)
