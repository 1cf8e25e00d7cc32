"""What recording costs on small models, beside a plain step and an empty mode, in one run.

    python -m benchmarks.measure.recording [--before SRC] [--rounds N] [--only NAME ...]

Every step of every model runs in turn, round after round, and is measured by processor time: a
figure is the median over the rounds of its time divided by the plain step's of the same round.
``--before`` is the ``src`` folder of another state of the project. It is loaded beside this one,
and runs in the same rounds.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import persample

from ..models.case import Case, classify
from ..models.pretrained import tiny_gpt2
from .overhead import busy, chain, layers, squares

PAIRS = 40
SHORT, LONG = 8, 64
Steps = dict[str, Callable[[], Any]]


class Empty(TorchFunctionMode):
    """Sees every call and does nothing: what any recorder in Python costs at least."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Passing(nn.Module):
    """Two rounds of messages along the edges of graphs of one size, then a mean over the nodes."""

    def __init__(self, nodes: int, edges: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.message = nn.ModuleList(nn.Linear(2 * width, 2 * width) for _ in range(2))
        self.update = nn.ModuleList(nn.Linear(4 * width, 2 * width) for _ in range(2))
        self.last = nn.Linear(2 * width, 3)
        self.register_buffer("edges", torch.randint(nodes, (2, edges)))

    def forward(self, x: Tensor) -> Tensor:
        """X: (samples, nodes, features)."""
        h = self.first(x).relu()
        start, end = self.edges
        for message, update in zip(self.message, self.update, strict=True):
            sent = message(h.index_select(1, start)).relu()
            arrived = torch.zeros_like(h).index_add(1, end, sent)
            h = update(torch.cat([h, arrived], -1)).relu() + h
        return self.last(h.mean(1))


class Bag(nn.Module):
    """Token vectors, gated and averaged: text classification at its smallest."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.gate, self.hidden = nn.Linear(width, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """X: (samples, tokens)."""
        h = self.norm(self.table(x))
        h = h * self.gate(h).sigmoid()
        return self.last(self.hidden(h.mean(1)).tanh())


def stack(pairs: int = PAIRS) -> Case:
    """Layers so small that only calls count."""
    parts = [part for _ in range(pairs) for part in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*parts), torch.randn(4, 4), torch.randn(4, 4), squares


def graph() -> Case:
    """A small network of messages."""
    return Passing(12, 30, 8), torch.randn(8, 12, 8), torch.randint(3, (8,)), classify


def text() -> Case:
    """A small classifier of token sequences."""
    return Bag(200, 32), torch.randint(200, (8, 16)), torch.randint(4, (8,)), classify


CASES: dict[str, Callable[[], Case]] = {
    "stack": stack, "tiny GPT-2": tiny_gpt2, "graph": graph, "text": text,
}  # fmt: skip


def other(src: Path) -> ModuleType:
    """Another state of the project, beside this one: each knows the other's functions as ours."""
    name, folder = "persample.before", src / "persample"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(case: Case, mode: type[TorchFunctionMode] | None = None) -> Callable[[], None]:
    """An ordinary step, under a mode or none."""
    net, x, y, loss = case

    def step() -> None:
        if mode is None:
            loss(net(x), y).sum().backward()
        else:
            with mode():
                loss(net(x), y).sum().backward()
        net.zero_grad(set_to_none=True)

    return step


def recorded(case: Case, library: Any, ask: Callable[[Any], Any] | None) -> Callable[[], None]:
    """A recorded step and one question, or none."""
    net, x, y, loss = case

    def step() -> None:
        with library.record(net) as tape:
            tape.backward(loss(net(x), y))
        if ask is not None:
            ask(tape)

    return step


def steps_of(case: Case, libraries: dict[str, Any]) -> Steps:
    """Every step of a model that is measured."""
    found: Steps = {"plain": plain(case), "empty mode": plain(case, Empty)}
    questions: dict[str, Callable[[Any], Any] | None] = {
        "recorded": None,
        "norms": lambda tape: tape.norms(),
        "clipped sum": lambda tape: tape.clipped_sum(1.0),
    }
    for question, ask in questions.items():
        for suffix, library in libraries.items():
            found[question + suffix] = recorded(case, library, ask)
    return found


def rounds_of(steps: Steps, rounds: int) -> dict[str, list[float]]:
    """Processor seconds of every step, round after round."""
    for _ in range(3):
        for step in steps.values():
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    for _ in range(rounds):
        for name, step in steps.items():
            found[name].append(busy(step))
    return found


def ratio(above: list[float], below: list[float]) -> float:
    """The median ratio of two steps of the same rounds."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def show(name: str, case: Case, libraries: dict[str, Any], rounds: int) -> None:
    """One model's table."""
    seconds = rounds_of(steps_of(case, libraries), rounds)
    base = seconds["plain"]
    print(f"{name}: plain {statistics.median(base) * 1e3:.3f} ms", flush=True)
    for step, values in seconds.items():
        line = f"    {step:22s} {ratio(values, base):6.2f} of plain"
        if name == "stack":
            line += f"  {statistics.median(values) * 1e6 / PAIRS:7.1f} µs per pair"
        earlier = seconds.get(f"{step}, before")
        if earlier is not None:
            line += f"  {ratio(values, earlier):6.2f} of before"
        print(line, flush=True)


def slopes(
    build: Callable[[int], Case], libraries: dict[str, Any], rounds: int
) -> dict[str, float]:
    """Microseconds that one more layer or operator adds to a plain step."""
    sizes = {count: build(count) for count in (SHORT, LONG)}
    steps: Steps = {}
    for count, case in sizes.items():
        steps[f"plain {count}"] = plain(case)
        steps[f"empty mode {count}"] = plain(case, Empty)
        for suffix, library in libraries.items():
            steps[f"recorded{suffix} {count}"] = recorded(case, library, None)
    seconds = rounds_of(steps, rounds)

    def added(name: str) -> float:
        each = [
            (a - b) - (c - d)
            for a, b, c, d in zip(
                *(seconds[f"{k} {count}"] for count in (LONG, SHORT) for k in (name, "plain")),
                strict=True,
            )
        ]
        return statistics.median(each) * 1e6 / (LONG - SHORT)

    return {name: added(name) for name in ("empty mode", *(f"recorded{s}" for s in libraries))}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measure.recording", description=__doc__
    )
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", nargs="*", default=["slopes", *CASES])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    libraries: dict[str, Any] = {"": persample}
    if given.before is not None:
        libraries[", before"] = other(given.before)
    for name in given.only:
        if name != "slopes":
            show(name, CASES[name](), libraries, given.rounds)
            continue
        for what, build in (("use", layers), ("data operator", chain)):
            found = slopes(build, libraries, 2 * given.rounds)
            text = ", ".join(f"{k} {us:.2f} µs" for k, us in found.items())
            print(f"per {what}, added to a plain step: {text}", flush=True)


if __name__ == "__main__":
    main()
