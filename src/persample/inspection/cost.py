"""The time of an inspection, compared with plain steps on the same batches."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..testing import LossFn

KEPT = 1000  # batches whose seconds are kept
TIMED = 2  # batches on which a plain step is timed as well


@dataclass(slots=True)
class Cost:
    """Seconds of the pass, by part, and plain steps on some of the same batches."""

    seconds: dict[str, float] = field(default_factory=dict)
    plain: list[float] = field(default_factory=list)
    inspected: list[float] = field(default_factory=list)
    total: float = 0.0

    @property
    def plain_seconds(self) -> float:
        """The median plain step; 0 if none was timed."""
        return statistics.median(self.plain) if self.plain else 0.0

    @property
    def ratio(self) -> float | None:
        """Inspecting a batch against a plain forward and backward, medians over batches."""
        if not self.plain:
            return None
        return statistics.median(self.inspected) / self.plain_seconds


class Stopwatch:
    """Times every batch by part, and a plain step on a few of them."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, cost: Cost, batches: int | None = None
    ) -> None:
        self.model, self.loss_fn, self.cost = model, loss_fn, cost
        self._seen = 0
        few = batches is not None and batches <= TIMED
        self._timed = range(1) if few else range(1, 1 + TIMED)  # the first batch warms up

    @contextlib.contextmanager
    def batch(self, batch: Any) -> Iterator[None]:
        """Time the block; on some batches a plain step before it."""
        plain = self._plain(batch) if self._seen in self._timed else None
        start = time.perf_counter()
        yield
        self._wait()
        taken = time.perf_counter() - start
        self.cost.total += taken
        self._seen += 1
        if plain is not None:
            self.cost.plain.append(plain)
        if self._seen > 1 or plain is not None:
            del self.cost.inspected[KEPT:]
            self.cost.inspected.append(taken)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of a batch."""
        start = time.perf_counter()
        yield
        self._wait()
        seconds = self.cost.seconds
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    def _plain(self, batch: Any) -> float:
        wanted = [p for p in self.model.parameters() if p.requires_grad]
        start = time.perf_counter()
        losses = self.loss_fn(self.model, batch)
        torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
