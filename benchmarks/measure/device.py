"""Time every question on any device, as a ratio to a plain step, interleaved.

    python -m benchmarks.measure.device [models ...] [--rounds 7] [--threads 1] [--device cpu]
                                        [--out FILE]

Each round runs the plain step and every question once, in turn; a question's figure is the median
over rounds of its time divided by the plain step's time in the same round. The heap is kept warm
where glibc's thresholds are set so that fresh pages do not decide.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import persample

from ..models import MODELS

DEFAULT = ["mlp", "cnn", "resnet18", "vit", "gpt", "gpt_tied", "bert", "lstm", "text"]


def questions(name: str) -> dict[str, Callable[[], Any]]:
    """The plain step and what is asked of persample, as functions without arguments."""
    torch.manual_seed(0)
    model, x, y, loss = MODELS[name]()
    buffers: dict[str, Any] = {}

    def plain() -> None:
        loss(model(x), y).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    def tape(**options: Any) -> persample.Tape:
        with persample.record(model, **options) as made:
            made.backward(loss(model(x), y))
        return made

    def grads() -> None:
        buffers.update(tape().grads(out=buffers or None))

    def three() -> None:
        made = tape()
        made.norms()
        made.clipped_sum(1.0)
        made.project(64, seed=0)

    steps: dict[str, Callable[[], Any]] = {
        "plain": plain,
        "norms": lambda: tape().norms(),
        "clipped sum": lambda: tape().clipped_sum(1.0),
        "clipped sum, lean": lambda: tape(lean=True).clipped_sum(1.0),
        "three questions": three,
    }
    if name != "gpt2_small":
        steps["grads, reused"] = grads
    return steps


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Medians and quartiles of the ratios, and the plain step's milliseconds."""
    steps = questions(name)
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {key: [] for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            finish()
            start = time.perf_counter()
            step()
            finish()
            times[key].append(time.perf_counter() - start)
    ratios = {
        key: [a / b for a, b in zip(values, times["plain"], strict=True)]
        for key, values in times.items()
        if key != "plain"
    }
    return {
        "plain_ms": statistics.median(times["plain"]) * 1e3,
        "rounds": rounds,
        "ratio": {key: statistics.median(r) for key, r in ratios.items()},
        "spread": {key: [min(r), max(r)] for key, r in ratios.items()},
    }


def _device() -> str:
    if torch.get_default_device().type == "cuda":
        return torch.cuda.get_device_name()
    return str(torch.get_default_device())


def finish() -> None:
    """Wait for the device."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


def environment() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "device": _device(),
        "cores": os.cpu_count(),
        "heap kept warm": "MALLOC_TRIM_THRESHOLD_" in os.environ,
    }


def main() -> None:
    """Measure and write."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measure.device", description=__doc__
    )
    parser.add_argument("models", nargs="*", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.set_default_device(given.device)
    found = {"environment": environment(), "models": {}}
    for name in given.models:
        found["models"][name] = result = measure(name, given.rounds)
        line = "  ".join(f"{key} {value:.2f}" for key, value in result["ratio"].items())
        print(f"{name:10s} plain {result['plain_ms']:7.1f} ms | {line}", flush=True)
        if given.out is not None:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
