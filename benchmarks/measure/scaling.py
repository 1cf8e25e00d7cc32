"""How the cost grows with samples, positions and depth.

    python -m benchmarks.measure.scaling RESULT.json [--quick]; the benchmark starts it.

A small language model, one axis at a time. Each point gives milliseconds (median of interleaved
rounds) and peak bytes of the plain step, the norms and the clipped sum. The exponent of an axis is
the slope of log cost over log size, fitted to the upper half of the axis, where the leading term
has taken over.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ..models.case import Case, predict
from ..models.language import LanguageModel
from ..peers.own import plain, recorded
from .memory import peak
from .process import run
from .timing import clock

AXES = {
    "n": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
    "t": [64, 128, 256, 512, 1024, 2048, 4096],
    "depth": [2, 4, 8, 16, 24, 32, 48],
}
SHORT = {"n": [1, 4, 16], "t": [64, 128, 256], "depth": [2, 4, 8]}
FIXED = {"n": 8, "t": 64, "depth": 2}
CORNER = {"t": {"n": 2}, "n": {"t": 32}}  # what else differs along an axis
WIDTH, WORDS = 64, 512
SECONDS, ROUNDS = 6.0, 7  # per point


def case_at(axis: str, size: int) -> Case:
    """The model and batch of one point."""
    at = {**FIXED, **CORNER.get(axis, {}), axis: size}
    torch.manual_seed(0)
    net = LanguageModel(WORDS, WIDTH, at["depth"], 2, at["t"], tied=False)
    x, y = (torch.randint(WORDS, (at["n"], at["t"])) for _ in range(2))
    return net, x, y, predict


def steps_of(case: Case) -> dict[str, Callable[[], Any]]:
    """What is measured at a point."""
    return {
        "plain": plain(case, 1.0)["step"],
        "norms": lambda: recorded(case).norms(),
        "clipped sum": lambda: recorded(case).clipped_sum(1.0),
        "clipped sum, lean": lambda: recorded(case, lean=True).clipped_sum(1.0),
    }


def point(axis: str, size: int) -> dict[str, Any]:
    """Milliseconds and bytes of every step."""
    steps = steps_of(case_at(axis, size))
    for step in steps.values():
        step()
    bytes_ = {name: peak(step)[0] for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    begun = time.perf_counter()
    for done in range(ROUNDS):
        if done >= 3 and (time.perf_counter() - begun) * (done + 1) / done > SECONDS:
            break
        for name, step in steps.items():
            seconds[name].append(clock(step))
    return {
        "size": size,
        "ms": {name: statistics.median(values) * 1e3 for name, values in seconds.items()},
        "bytes": bytes_,
    }


def exponent(sizes: list[int], costs: list[float]) -> float:
    """Slope of log cost over log size on the upper half of the axis."""
    keep = max(2, math.ceil(len(sizes) / 2))
    x = [math.log(size) for size in sizes[-keep:]]
    y = [math.log(max(cost, 1e-9)) for cost in costs[-keep:]]
    return statistics.linear_regression(x, y).slope


def fitted(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Exponents of time and memory of every step."""
    sizes = [p["size"] for p in points]
    return {
        kind: {name: exponent(sizes, [p[kind][name] for p in points]) for name in points[0][kind]}
        for kind in ("ms", "bytes")
    }


def measure(axes: dict[str, list[int]]) -> dict[str, Any]:
    """Every axis."""
    found: dict[str, Any] = {}
    for axis, sizes in axes.items():
        points = []
        for size in sizes:
            points.append(point(axis, size))
            line = ", ".join(f"{k} {v:.1f}" for k, v in points[-1]["ms"].items())
            print(f"    {axis} = {size}: {line} ms", flush=True)
        fixed = {k: v for k, v in {**FIXED, **CORNER.get(axis, {})}.items() if k != axis}
        found[axis] = {"fixed": fixed, "points": points, "exponents": fitted(points)}
    return found


if __name__ == "__main__":
    run("scaling", __doc__, lambda quick: measure(SHORT if quick else AXES))
