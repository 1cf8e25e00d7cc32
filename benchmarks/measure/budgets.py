"""The clipped sum by memory budget: time and peak memory against a plain step.

    python -m benchmarks.measure.budgets RESULT.json [--quick]; the benchmark starts it.

Each round runs the plain step and the clipped sum under every budget in turn; a figure is the
median over rounds of the ratio of processor times. "rows" writes all gradients out and sums them.
Memory is the highest number of bytes that torch has allocated during a step, by its profiler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ..models import MODELS
from ..peers.answers import rows_clipped
from ..peers.own import plain, recorded
from .expanded_weights import peak
from .process import run, settle

NAMES = ("vit", "gpt", "bert", "llama")
BUDGETS = {"default": None, **{f"{size} MiB": size << 20 for size in (16, 64, 256, 1024)}}
ROUNDS = 5


def steps(name: str) -> dict[str, Callable[[], Any]]:
    """The plain step, the clipped sum under each budget, and rows written out."""
    torch.manual_seed(0)
    case = MODELS[name]()
    bound = float(recorded(case).norms().median())
    found: dict[str, Callable[[], Any]] = {"plain": plain(case, bound)["step"]}
    for key, budget in BUDGETS.items():
        found[key] = lambda b=budget: recorded(case, budget=b).clipped_sum(bound)  # type: ignore[misc]
    found["rows"] = lambda: rows_clipped(recorded(case).grads(), bound)
    return found


def model(name: str, rounds: int) -> dict[str, Any]:
    """Ratios of time and of peak memory, by budget."""
    each = steps(name)
    for step in each.values():
        step()
    times: dict[str, list[float]] = {key: [] for key in each}
    for _ in range(rounds):
        for key, step in each.items():
            start = time.process_time()
            step()
            times[key].append(time.process_time() - start)
    settle()
    sizes = {key: peak(step) for key, step in each.items()}
    base, size = times.pop("plain"), sizes.pop("plain")
    return {
        "plain_ms": statistics.median(base) * 1e3,
        "plain_bytes": size,
        "budgets": {
            key: {
                "time": statistics.median(a / b for a, b in zip(found, base, strict=True)),
                "memory": sizes[key] / size,
            }
            for key, found in times.items()
        },
    }


def measure(quick: bool) -> dict[str, Any]:
    """Every model."""
    found = {}
    for name in NAMES[2:3] if quick else NAMES:
        found[name] = model(name, 2 if quick else ROUNDS)
        cells = (
            f"{k} {v['time']:.2f} ({v['memory']:.2f})" for k, v in found[name]["budgets"].items()
        )
        print(f"    {name:10s} {'  '.join(cells)}", flush=True)
    return found


if __name__ == "__main__":
    run("budgets", __doc__, measure)
