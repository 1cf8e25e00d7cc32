"""The drop-in beside the original, on models that both support.

    python -m benchmarks.expanded_weights [models ...] [--rounds 15] [--out FILE.json]

Every round runs the original and the drop-in once, on the same model, every other round in the
opposite order: what runs after a step that wrote many rows finds nothing in the cache. The figure
is the median over rounds of the original's processor time divided by the drop-in's in the same
round (above one: the drop-in is faster). Memory is the peak of what torch allocated during one
step, beyond what was there before. The figure for a plain step, run afterwards, is to compare.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads as original

from persample.expanded_weights import call_for_per_sample_grads as ours

from ..models import MODELS as LARGER
from .results import environment

Case = tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]
Step = Callable[[], Any]
MODELS: dict[str, Callable[[], Case]] = {}
_CPU = [torch.profiler.ProfilerActivity.CPU]


def model(build: Callable[[], Case]) -> Callable[[], Case]:
    """Register a model under its function's name."""
    MODELS[build.__name__] = build
    return build


def squares(out: Any) -> Tensor:
    """A loss that needs no labels."""
    return (out[0] if isinstance(out, tuple) else out).square().sum()


def borrowed(name: str) -> Case:
    """A model of the other benchmark, with its loss."""
    net, x, y, loss = LARGER[name]()
    return net, x, lambda out: loss(out, y).sum()


@model
def mlp() -> Case:
    """Three linear layers of moderate width."""
    layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers), torch.randn(128, 784), squares


@model
def tokens() -> Case:
    """Linear layers and LayerNorm on sequences."""
    layers = [nn.Linear(128, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 128)]
    return nn.Sequential(*layers), torch.randn(32, 64, 128), squares


@model
def cnn() -> Case:
    """The convolutional network of the other benchmark."""
    return borrowed("cnn")


@model
def resnet18() -> Case:
    """ResNet-18 with GroupNorm, 16 images."""
    net, x, y, each = LARGER["resnet18"]()
    return net, x[:16], lambda out: each(out, y[:16]).sum()


@model
def depthwise() -> Case:
    """Depthwise separable convolutions."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 32, 1), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(32, 32, 16, 16), squares


@model
def instance_norm() -> Case:
    """One-dimensional convolutions with InstanceNorm."""
    layers = [nn.Conv1d(16, 32, 5), nn.InstanceNorm1d(32, affine=True), nn.Conv1d(32, 16, 5)]
    return nn.Sequential(*layers), torch.randn(64, 16, 64), squares


@model
def volume() -> Case:
    """Three-dimensional convolutions."""
    layers = [nn.Conv3d(2, 8, 3), nn.ReLU(), nn.Conv3d(8, 8, 3)]
    return nn.Sequential(*layers), torch.randn(16, 2, 12, 12, 12), squares


class Text(nn.Module):
    """An embedding, a mean over positions, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(2000, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every sample."""
        out: Tensor = self.head(self.words(x).mean(1))
        return out


@model
def text() -> Case:
    """A bag of words."""
    return Text(), torch.randint(2000, (64, 32)), squares


@model
def rnn() -> Case:
    """A plain recurrent layer."""
    return nn.RNN(64, 64, batch_first=True), torch.randn(32, 32, 64), squares


@model
def gru() -> Case:
    """A gated recurrent layer."""
    return nn.GRU(64, 64, batch_first=True), torch.randn(32, 32, 64), squares


@model
def lstm() -> Case:
    """The text classifier of the other benchmark, in double precision.

    The original crashes on a float32 LSTM on the CPU.
    """
    net, x, loss = borrowed("lstm")
    return net.double(), x, loss


@model
def lstm_layers() -> Case:
    """Two narrow LSTM layers on their own, in double precision."""
    net = nn.LSTM(64, 64, 2, batch_first=True).double()
    return net, torch.randn(32, 32, 64, dtype=torch.float64), squares


def steps(name: str) -> dict[str, Step]:
    """One training step without its update, by each way."""
    torch.manual_seed(0)
    net, x, loss = MODELS[name]()
    parameters = list(net.parameters())

    def step(forward: Callable[[nn.Module], Callable[..., Any]]) -> Step:
        def run() -> None:
            loss(forward(net)(x)).backward()
            for p in parameters:
                p.grad = p.grad_sample = None  # type: ignore[attr-defined]

        return run

    return {"plain": step(lambda net: net), "original": step(original), "ours": step(ours)}


def peak(step: Step) -> int:
    """Bytes allocated at the highest point of one step."""
    gc.collect()
    with torch.profiler.profile(profile_memory=True, activities=_CPU, acc_events=True) as profile:
        step()
    now = top = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            top = max(top, now)
    return top


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Medians of the ratios, milliseconds, and peaks of memory."""
    each = steps(name)
    for step in each.values():
        step()
        step()
    times: dict[str, list[float]] = {key: [] for key in each}
    pair = ["original", "ours"]
    for k in range(2 * rounds):
        for key in ["plain"] if k >= rounds else pair[:: 1 - 2 * (k % 2)]:
            start = time.process_time()
            each[key]()
            times[key].append(time.process_time() - start)
    ratios = [a / b for a, b in zip(times["original"], times["ours"], strict=True)]
    memory = {key: peak(step) for key, step in each.items()}
    return {
        "ms": {key: statistics.median(values) * 1e3 for key, values in times.items()},
        "rounds": rounds,
        "speedup": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "peak_mib": {key: value / 2**20 for key, value in memory.items()},
        "memory_ratio": memory["ours"] / memory["original"],
    }


def main() -> None:
    """Measure and write."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expanded_weights")
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found: dict[str, Any] = {"environment": environment(), "models": {}}
    for name in given.models:
        found["models"][name] = result = measure(name, given.rounds)
        ms, mib = result["ms"], result["peak_mib"]
        print(
            f"{name:14s} plain {ms['plain']:7.1f} ms  original {ms['original']:7.1f}  "
            f"ours {ms['ours']:7.1f}  speedup {result['speedup']:5.2f} | "
            f"MiB {mib['plain']:6.1f} {mib['original']:6.1f} {mib['ours']:6.1f}",
            flush=True,
        )
        if given.out is not None:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
