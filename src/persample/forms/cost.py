"""What a question costs: multiplications, memory traffic, and scratch memory cut to a budget.

Every choice between two ways of computing the same numbers is made here, anew for each call, from
the sizes of that call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

BUDGET = 64 << 20  # bytes of scratch memory that a question may take beyond its result
LEAN = 2 << 20  # where as little memory as possible is to be held at once
WALK = 16 << 20  # the same where less would mean to walk one graph again and again
SHARE = 5  # of what a plain step holds: a fifth more is kept, a quarter more held with tiles
LITTLE = 1 << 20  # bytes of rows that are not worth counting
LIMIT: ContextVar[int] = ContextVar("scratch memory", default=BUDGET)
_BYTE = 2  # multiplications that take as long as moving a byte of an intermediate result
JOINED = 1 << 14  # elements whose copy takes less time than the calls that it saves
WRITTEN = 1 << 17  # elements of rows that take less time than the calls of products of positions
WORK = 1 << 22  # multiplications that such rows may take
PICKED = 1 << 17  # elements whose sum takes longer than picking some of them
MATCHED = 16  # elements of a table that are multiplied while one of a row is picked and multiplied


def scratch() -> int:
    """Bytes that the question being answered may take."""
    return LIMIT.get()


@contextlib.contextmanager
def within(budget: int) -> Iterator[None]:
    """Answer questions with this much scratch memory."""
    token = LIMIT.set(budget)
    try:
        yield
    finally:
        LIMIT.reset(token)


def spans(count: int, item_bytes: int, budget: int | None = None) -> Iterator[tuple[int, int]]:
    """Cut ``count`` items into runs that fit the budget (one item at least)."""
    limit = scratch() if budget is None else min(budget, scratch())
    step = max(1, min(count, limit // max(item_bytes, 1)))
    for first in range(0, count, step):
        yield first, min(first + step, count)


@dataclass(frozen=True, slots=True)
class Plan:
    """One way of taking norms: what it computes, moves, and needs at a time.

    ``flops`` are multiplications, ``moved`` bytes of intermediate results written and read,
    ``item`` the bytes that cannot be cut further, ``items`` how many of those there are.
    """

    way: str
    flops: int
    moved: int
    item: int
    items: int

    @property
    def cost(self) -> int:
        """Time, in multiplications."""
        return self.flops + _BYTE * self.moved

    @property
    def tiles(self) -> int:
        """Into how many pieces the budget cuts the work."""
        step = max(1, scratch() // max(self.item, 1))
        return -(-self.items // step)

    def __str__(self) -> str:
        return self.way + (f", {self.tiles} tiles" if self.tiles > 1 else "")


def all_of(plans: Sequence[Plan], n: int) -> Plan:
    """Of all parts, each computed on its own."""
    ways = " + ".join(dict.fromkeys(p.way for p in plans))
    flops, moved = sum(p.flops for p in plans), sum(p.moved for p in plans)
    return Plan(ways or "nothing", flops, moved, max((p.item for p in plans), default=0), n)


def cheapest(*plans: Plan) -> Plan:
    """The plan that takes the least time."""
    return min(plans, key=lambda plan: plan.cost)
