"""Norms and clipped sums of small models, where Python decides.

    python -m benchmarks.measure.small RESULT.json [--quick]; the benchmark starts it.

Every answer is compared with one sample at a time first. Then rounds, each the plain step and both
questions in turn, several times; a figure is the median over rounds of the ratio of processor
times. The summary is over models: median and 90th percentile.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from ..models import SMALL
from ..peers import PEERS
from ..peers.answers import drawn
from .process import run
from .timing import Cell, judged

QUESTIONS = ("norms", "clipped sum")
ROUNDS, WORK = 9, 0.02  # seconds of plain steps in a round


def spent(step: Callable[[], Any], repeat: int) -> float:
    """Processor seconds of some steps."""
    start = time.process_time()
    for _ in range(repeat):
        step()
    return time.process_time() - start


def model(name: str, rounds: int) -> dict[str, Any]:
    """One model's ratios, or what was wrong with an answer."""
    case, referee, _ = drawn(SMALL[name])
    asked, plain = PEERS["persample"](case, referee.bound), PEERS["plain"](case, 1.0)["step"]
    for question in QUESTIONS:
        cell = Cell("persample", question, asked[question])
        judged(cell, case, referee)
        if cell.found["state"] != "right":
            return {"parameters": 0, "question": question, **cell.found}
    repeat = max(1, math.ceil(WORK / max(spent(plain, 3) / 3, 1e-6)))
    steps = {"plain": plain, **{q: asked[q] for q in QUESTIONS}}
    times: dict[str, list[float]] = {key: [] for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            times[key].append(spent(step, repeat) / repeat)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in case[0].parameters())}
    found["plain_ms"] = statistics.median(times["plain"]) * 1e3
    for question in QUESTIONS:
        ratios = [a / b for a, b in zip(times[question], times["plain"], strict=True)]
        found[question] = statistics.median(ratios)
    return found


def summary(models: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Median and 90th percentile over models."""
    found = {}
    for question in QUESTIONS:
        ratios = [each[question] for each in models.values() if question in each]
        found[question] = {
            "median": statistics.median(ratios),
            "90th percentile": statistics.quantiles(ratios, n=10, method="inclusive")[-1],
        }
    return found


def measure(quick: bool) -> dict[str, Any]:
    """Every small model; a few of them, quickly."""
    names = list(SMALL)[::7] if quick else list(SMALL)
    models = {}
    for name in names:
        models[name] = each = model(name, 3 if quick else ROUNDS)
        ratios = "  ".join(f"{q} {each.get(q, math.nan):.2f}" for q in QUESTIONS)
        print(f"    {name:22s} {ratios}", flush=True)
    return {"models": models, "summary": summary(models)}


if __name__ == "__main__":
    run("small", __doc__, measure)
