"""Attacks by orders over all samples: what is sorted again by owner, and what only looks like it.

Every element of a hidden row is a row of its sample; the outputs are weighed by what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .base import EXACT, REFUSED, N, Script
from .coupled import Weigh, clipped

OWNER = torch.arange(N).repeat_interleave(N)
COLUMNS = torch.arange(N)[:, None].expand(N, N)


def orders(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All elements, their order, and the places of each sample's elements in it."""
    values = h.flatten()
    order = values.argsort()
    return values, order, OWNER[order].argsort(stable=True)


def by_owner(h: Tensor) -> Tensor:
    values, order, back = orders(h)
    return values[order[back]].view(N, N)


def values_by_owner(h: Tensor) -> Tensor:
    ranked, order = h.flatten().sort(descending=True)
    _, back = torch.sort(OWNER[order], descending=True, stable=True)
    return ranked[back].view(N, N).flip(0)


def two_largest(h: Tensor) -> Tensor:
    values, order, back = orders(h)
    return values[order[back[torch.arange(N * N) % N >= 2]]].view(N, 2).sum(1, keepdim=True)


def by_pair(h: Tensor) -> Tensor:
    values, order, _ = orders(h)
    return values[order[(OWNER // 2)[order].argsort(stable=True)]].view(N, N)


def by_unstable_keys(h: Tensor) -> Tensor:
    values, order, _ = orders(h)
    return values[order[OWNER[order].argsort()]].view(N, N)


def by_real_keys(h: Tensor) -> Tensor:
    values, order, _ = orders(h)
    return values[order[OWNER.double()[order].argsort(stable=True)]].view(N, N)


def of_another_order(h: Tensor) -> Tensor:
    values, _, back = orders(h)
    return values[(-values).argsort()[back]].view(N, N)


def of_the_first(h: Tensor) -> Tensor:
    values, order, _ = orders(h)
    first = order[: 2 * N]
    return values[first[OWNER[first].argsort(stable=True)]].view(N, 2).sum(1, keepdim=True)


def shifted(h: Tensor) -> Tensor:
    values, order, back = orders(h)
    return values[order[back.roll(1)]].view(N, N)


def exchanged(h: Tensor) -> Tensor:
    values, order, back = orders(h)
    order[:2] = order[:2].flip(0)
    return values[order[back]].view(N, N)


def halved(h: Tensor) -> Tensor:
    values, order, back = orders(h)
    return values[order[(back // 2)]].view(N, N)


def narrowed(h: Tensor) -> Tensor:
    values, order, back = orders(h)
    return values[order[(back + 250).to(torch.uint8).long() % (N * N)]].view(N, N)


def columns(h: Tensor) -> Tensor:
    ranked, order = h.sort(0)
    return ranked.gather(0, COLUMNS.gather(0, order).argsort(dim=0, stable=True))


def one_column_for_all(h: Tensor) -> Tensor:
    ranked, order = h.sort(0)
    back = COLUMNS.gather(0, order).argsort(dim=0, stable=True)
    return ranked.gather(0, back[:, :1].expand(N, N))


def read_by_rows(h: Tensor) -> Tensor:
    ranked, order = h.sort(0)
    return ranked[COLUMNS.gather(0, order).argsort(dim=0, stable=True)].sum(1)


def starts(h: Tensor) -> Tensor:
    """Where a sample's rows begin, if those below zero are left out."""
    kept = OWNER[(h > 0).flatten()]
    count = (h > 0).sum(1)
    start = count.cumsum(0) - count
    return (torch.arange(len(kept)) - start[kept]).double().sum()[None] + start[:, None].double()


WEIGHTS: dict[str, tuple[str, Weigh]] = {
    "by owner": (EXACT, by_owner),
    "values by owner": (EXACT, values_by_owner),
    "the two largest of each": (EXACT, two_largest),
    "by pairs of owners": (REFUSED, by_pair),
    "by owner, unstably": (REFUSED, by_unstable_keys),
    "by real keys": (REFUSED, by_real_keys),
    "places in another order": (REFUSED, of_another_order),
    "the first of all, by owner": (REFUSED, of_the_first),
    "places shifted": (REFUSED, shifted),
    "places halved": (REFUSED, halved),
    "places in a narrow type": (REFUSED, narrowed),
    "an order written to": (REFUSED, exchanged),
    "places as numbers": (REFUSED, lambda h: orders(h)[2].view(N, N).double()),
    "an order as numbers": (REFUSED, lambda h: orders(h)[1].view(N, N).double()),
    "every column": (EXACT, columns),
    "one column for all": (REFUSED, one_column_for_all),
    "columns read by rows": (REFUSED, read_by_rows),
    "where rows begin": (REFUSED, starts),
}


def scripts() -> Iterator[Script]:
    """Weights."""
    for name, (expectation, weigh) in WEIGHTS.items():
        yield Script(f"ranked: {name}", lambda weigh=weigh: clipped(weigh), expectation)
