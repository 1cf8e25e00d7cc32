"""What inspecting a data set costs against one plain training epoch over it.

    python -m benchmarks.measure.inspecting [--rounds 3] [--out FILE.json]

Each round trains one epoch (forward, backward, Adam) and inspects the same batches once, self-check
and timing of plain steps included; the figure is the median over rounds of the ratio
of processor times, on one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import persample

from ..models import MODELS
from ..models.case import predict
from ..models.language import LanguageModel
from .results import environment

BATCHES = (64, 256)  # what an inspection costs once is shared by more samples in the second
Data = list[tuple[Tensor, Tensor]]
LossFn = Callable[[nn.Module, Any], Tensor]


def small_cnn(count: int) -> tuple[nn.Module, LossFn, Data]:
    """Four convolutions on 32×32 images, batches of 64."""
    model, x, y, loss = MODELS["cnn"]()
    data = [(torch.randn_like(x), torch.randint_like(y, 10)) for _ in range(count)]
    return model, lambda m, b: loss(m(b[0]), b[1]), data


def tiny_transformer(count: int) -> tuple[nn.Module, LossFn, Data]:
    """A language model of two blocks of 128, batches of 16 sequences of 64."""
    model = LanguageModel(2000, 128, 2, 4, 64, tied=False)
    data = [(torch.randint(2000, (16, 64)), torch.randint(2000, (16, 64))) for _ in range(count)]
    return model, lambda m, b: predict(m(b[0]), b[1]), data


CASES = {"small cnn": small_cnn, "tiny transformer": tiny_transformer}


def measure(name: str, count: int, rounds: int) -> dict[str, Any]:
    """Ratios, and where the time of an inspection went (medians over rounds)."""
    torch.manual_seed(0)
    model, loss_fn, data = CASES[name](count)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    def epoch() -> None:
        for batch in data:
            optimizer.zero_grad()
            loss_fn(model, batch).mean().backward()
            optimizer.step()

    epoch()
    ratios, seconds = [], []
    parts: dict[str, list[float]] = {}
    for _ in range(rounds):
        start = time.process_time()
        epoch()
        middle, clock = time.process_time(), time.perf_counter()
        report = persample.inspect(model, loss_fn, data, progress=False)
        end, passed = time.process_time(), time.perf_counter() - clock
        seconds.append(middle - start)
        ratios.append((end - middle) / (middle - start))
        each = {k: v / passed * ratios[-1] for k, v in report.cost.seconds.items()}
        each["self-check, plain steps, rest"] = ratios[-1] - sum(each.values())
        for part, value in each.items():
            parts.setdefault(part, []).append(value)
    return {
        "batches": count,
        "epoch_s": statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "parts of an epoch": {part: statistics.median(v) for part, v in parts.items()},
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measure.inspecting", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"environment": environment(), "cases": {}}
    for name, count in itertools.product(CASES, BATCHES):
        result = measure(name, count, given.rounds)
        found["cases"][f"{name}, {count} batches"] = result
        parts = "  ".join(f"{k} {v:.2f}" for k, v in result["parts of an epoch"].items())
        print(f"{name:18s} {count:4} {result['ratio']:.2f} of an epoch | {parts}", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
