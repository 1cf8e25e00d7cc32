"""The plain step, which everything is divided by, and persample."""

from __future__ import annotations

from typing import Any

import persample

from ..models.case import Case
from .answers import Grads
from .peer import Steps, clear, peer


@peer("plain")
def plain(case: Case, bound: float) -> Steps:
    """An ordinary forward and backward: what everything is divided by."""
    net, x, y, loss = case

    def step() -> None:
        loss(net(x), y).sum().backward()
        clear(net)

    return {"step": step}


def recorded(case: Case, **options: Any) -> persample.Tape:
    """One recorded step."""
    net, x, y, loss = case
    with persample.record(net, **options) as tape:
        tape.backward(loss(net(x), y))
    return tape


@peer("persample")
def own(case: Case, bound: float) -> Steps:
    """The tape, with buffers reused for grads, and three questions of one tape."""
    buffers: Grads = {}

    def grads() -> Grads:
        buffers.update(recorded(case).grads(out=buffers or None))
        return buffers

    def three() -> None:
        tape = recorded(case)
        tape.norms()
        tape.clipped_sum(bound)
        tape.project(64, seed=0)

    return {
        "grads": grads,
        "norms": lambda: recorded(case).norms(),
        "clipped sum": lambda: recorded(case).clipped_sum(bound),
        "gram": lambda: recorded(case).gram(),
        "three questions": three,
    }


@peer("persample, fresh")
def fresh(case: Case, bound: float) -> Steps:
    """Grads into fresh memory, as every peer gives them."""
    return {"grads": lambda: recorded(case).grads()}


@peer("persample, lean")
def lean(case: Case, bound: float) -> Steps:
    """Nothing kept, a second backward for the sum."""
    once, rows = persample.Ahead(again=False), persample.Ahead(grads=True, again=False)
    return {
        "grads": lambda: recorded(case, lean=rows).grads(),
        "norms": lambda: recorded(case, lean=once).norms(),
        "clipped sum": lambda: recorded(case, lean=True).clipped_sum(bound),
    }
