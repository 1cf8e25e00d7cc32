"""``record(..., grad=True)`` in several processes: the ``.grad`` of the same wrapper without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import persample

from .base import data, squares
from .ranks import PAIRS, Odd, body, mine, scenario, sharded

Wrap = Callable[[nn.Module], Any]
Step = Callable[[nn.Module, Tensor], None]


def local(gradient: Tensor | None) -> Tensor | None:
    """What this process holds of a gradient."""
    if gradient is None:
        return None
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def apart(model: nn.Module, twin: nn.Module, *, parameters: bool = False) -> float:
    """The largest difference of gradients (or parameters), inf where one has None."""
    worst = 0.0
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        mine, theirs = (local(p if parameters else p.grad) for p in (one, two))
        if (mine is None) is not (theirs is None):
            return float("inf")
        if mine is not None and theirs is not None and mine.numel():
            worst = max(worst, float((mine - theirs).detach().abs().max()))
    return worst


def plain(model: nn.Module, x: Tensor) -> None:
    squares(model, x).mean().backward()


def compare(
    make: Callable[[], nn.Module], wrap: Wrap, step: Step | None = None, *, steps: int = 3,
    clear: bool = True, **options: Any,
) -> float:  # fmt: skip
    """Steps of a wrapped model, recorded, against those of the same without persample."""
    model, twin = wrap(make()), wrap(make())
    movers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin)]
    worst = 0.0
    for k in range(steps):
        part = mine(data(7 * (k + 1), 5)[7 * k :])
        for mover in movers if clear else ():
            mover.zero_grad()
        (step or (lambda m, x: squares(m, x).sum().backward()))(twin, part)
        with persample.record(model, grad=True, **options) as tape:
            if step is None:
                tape.backward(squares(model, part))
            else:
                step(model, part)
        worst = max(worst, apart(model, twin))
        for mover in movers:
            mover.step()
        worst = worst if tape.norms().shape == (len(part),) else float("inf")
    return max(worst, apart(model, twin, parameters=True))


@scenario("DDP, record(..., grad=True): the mean over processes, as DDP leaves it")
def replicated() -> float:
    return compare(body, DistributedDataParallel)


@scenario("DDP, grad=True, a plain loss.backward() in the block", kind=PAIRS)
def unchanged() -> float:
    return compare(body, DistributedDataParallel, plain)


@scenario("DDP, grad=True, lean recording", kind=PAIRS)
def lean() -> float:
    return compare(body, DistributedDataParallel, lean=True)


@scenario("DDP, grad=True, gradients add up over steps", kind=PAIRS)
def added() -> float:
    return compare(body, DistributedDataParallel, clear=False)


@scenario("DDP, grad=True, gradient_as_bucket_view=True", kind=PAIRS)
def bucketed() -> float:
    return compare(body, lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True))


class Sometimes(nn.Module):
    """A layer that one process uses, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.some, self.none = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.some(h) if dist.get_rank() == 0 else h


@scenario("DDP, grad=True, find_unused_parameters=True, a layer that one process uses", kind=PAIRS)
def unused() -> float:
    return compare(Sometimes, lambda m: DistributedDataParallel(m, find_unused_parameters=True))


@scenario("DDP, grad=True, micro-batches in no_sync(), the last one outside", kind=PAIRS)
def unsynced() -> float:
    model, twin = (DistributedDataParallel(body()) for _ in range(2))
    worst = 0.0
    for _ in range(2):
        for k, part in enumerate(data(21, 5).split(7)):
            for each in (model, twin):
                context = each.no_sync() if k < 2 else contextlib.nullcontext()
                with context:
                    if each is twin:
                        squares(each, mine(part)).sum().backward()
                        continue
                    with persample.record(each, grad=True) as tape:
                        tape.backward(squares(each, mine(part)))
            worst = max(worst, apart(model, twin))
        model.zero_grad()
        twin.zero_grad()
    return worst


@scenario("DDP, grad=True, then a plain step of the wrapper", kind=PAIRS)
def followed() -> float:
    model, twin = (DistributedDataParallel(body()) for _ in range(2))
    x, worst = mine(data(7, 5)), 0.0
    for k in range(4):
        plain(twin, x)
        if k % 2:
            plain(model, x)
        else:
            with persample.record(model, grad=True):
                plain(model, x)
        worst = max(worst, apart(model, twin))
    return worst


def by_part(model: Any) -> Any:
    return sharded(model, model[2])


@scenario("fully_shard, record(..., grad=True): the mean over processes, as fully_shard leaves it")
def shards() -> float:
    return compare(body, by_part)


@scenario("fully_shard, grad=True, a plain loss.backward() in the block", kind=PAIRS)
def unchanged_shards() -> float:
    return compare(body, by_part, plain)


@scenario("fully_shard, grad=True, lean recording", kind=PAIRS)
def lean_shards() -> float:
    return compare(body, by_part, lean=True)


@scenario("fully_shard, grad=True, gradients add up over steps", kind=PAIRS)
def added_shards() -> float:
    return compare(body, by_part, clear=False)


@scenario("fully_shard, grad=True: weight_norm, tied and frozen weights, checkpointing", kind=PAIRS)
def odd_shards() -> float:
    return compare(Odd, sharded)
