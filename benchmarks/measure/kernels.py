"""The time of torch's kernels alone, by its profiler: a step's cost if Python were free."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd.profiler import profile

_OPERATORS = ("aten::", "mkldnn::")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The profiler writes two lines to the terminal whenever it runs."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def spent(step: Callable[[], Any]) -> float:
    """Seconds inside operators, without what called them."""
    with _silent(), profile(use_kineto=False) as seen:
        step()
    inside = (e for e in seen.key_averages() if e.key.startswith(_OPERATORS))
    return float(sum(event.self_cpu_time_total for event in inside)) * 1e-6


def kernels(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Every step's kernels as a ratio to those of the step "plain", median over rounds."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            found[name].append(spent(step))
    base = found.pop("plain")
    return {
        name: statistics.median(a / b for a, b in zip(values, base, strict=True))
        for name, values in found.items()
    }
