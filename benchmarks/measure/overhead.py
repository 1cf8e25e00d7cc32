"""What recording costs per use and per data operator, and where the time of a step goes.

    python -m benchmarks.measure.overhead RESULT.json [--quick]; the benchmark starts it.

The cost of a use is the slope, over the number of layers, of a recorded step's time minus a plain
step's, on layers so small that arithmetic does not count. The cost of a data operator is the same
slope over the number of operators between two layers. Forward and backward together, no question;
processor time, fastest of the rounds: a step of a few milliseconds is easily disturbed.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import persample

from ..models import MODELS
from ..models.case import Case
from ..models.pretrained import tiny_gpt2
from ..peers.answers import TOLERANCE, coefficients, deviation
from ..peers.by_hand import by_hand
from ..peers.own import own, plain, recorded
from .kernels import kernels
from .process import run
from .timing import clock

COUNTS = [8, 16, 32, 64]
ROUNDS, SECONDS = 15, 20.0
STEPS = (
    "mlp", "cnn", "resnet18", "vit", "gpt", "gpt_tied", "bert", "gpt2_small", "lstm", "text",
)  # fmt: skip


class Chain(nn.Module):
    """A layer, a chain of data operators, a layer."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.first, self.last, self.operators = nn.Linear(8, 8), nn.Linear(8, 8), operators

    def forward(self, x: Tensor) -> Tensor:
        """Each operator is one call of torch."""
        h = self.first(x)
        for _ in range(self.operators):
            h = h.tanh()
        return self.last(h)


def squares(out: Tensor, y: Tensor) -> Tensor:
    """A loss of one operator and a sum."""
    return (out - y).square().sum(1)


def layers(count: int) -> Case:
    """A stack of small linear layers."""
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)])
    return net, torch.randn(4, 8), torch.randn(4, 8), squares


def chain(count: int) -> Case:
    """Two layers and a chain between them."""
    return Chain(count), torch.randn(4, 8), torch.randn(4, 8), squares


def busy(step: Callable[[], Any]) -> float:
    """Processor seconds of one step: another program on the core does not count."""
    start = time.process_time()
    step()
    return time.process_time() - start


def interleaved(
    steps: dict[str, Callable[[], Any]], rounds: int, measure: Callable[..., float] = clock
) -> dict[str, list[float]]:
    """Seconds of every step, by rounds."""
    for step in steps.values():
        step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    begun = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and (time.perf_counter() - begun) * (done + 1) / done > SECONDS:
            break
        for name, step in steps.items():
            found[name].append(measure(step))
    return found


def slope(build: Callable[[int], Case], rounds: int) -> dict[str, Any]:
    """Microseconds that recording adds per layer or operator."""
    added = []
    for count in COUNTS:
        case = build(count)
        steps = {"plain": plain(case, 1.0)["step"], "recorded": lambda c=case: recorded(c)}
        seconds = interleaved(steps, rounds, busy)
        added.append((min(seconds["recorded"]) - min(seconds["plain"])) * 1e6)
    line = statistics.linear_regression(COUNTS, added)
    return {
        "us": line.slope,
        "fixed_us": line.intercept,
        "correlation": statistics.correlation(COUNTS, added),
        "counts": COUNTS,
        "added_us": added,
    }


def asked(case: Case) -> dict[str, Callable[[], Any]]:
    """The plain step, recording, and each question with it."""
    questions = own(case, 1.0)
    return {
        "plain": plain(case, 1.0)["step"],
        "recording": lambda: recorded(case),
        **{name: questions[name] for name in ("norms", "clipped sum", "grads")},
    }


def ratios(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Every step as a ratio to plain."""
    seconds = interleaved(steps, rounds)
    base = seconds.pop("plain")
    found: dict[str, Any] = {"plain_ms": statistics.median(base) * 1e3}
    for name, values in seconds.items():
        found[name] = statistics.median(a / b for a, b in zip(values, base, strict=True))
    return found


@contextlib.contextmanager
def frozen(net: nn.Module) -> Iterator[None]:
    """No parameter wants a gradient, but everything behind the first layer does."""
    named = [p for p in net.parameters() if p.requires_grad]

    def wants(module: nn.Module, args: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, Tensor) and first.is_leaf and first.is_floating_point():
            first.requires_grad_()

    hooks = [m.register_forward_hook(wants) for m in net.modules() if m._parameters]
    for parameter in named:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in named:
            parameter.requires_grad_(True)
        for hook in hooks:
            hook.remove()


def steps(case: Case, rounds: int) -> dict[str, Any]:
    """What a step costs without any weight gradient, recorded, and with its questions."""
    net, x, y, loss = case

    def inputs_only() -> None:
        with frozen(net):
            loss(net(x), y).sum().backward()

    hand = {f"{question}, by hand": step for question, step in written(case).items()}
    found = ratios({**asked(case), "no weight gradients": inputs_only, **hand}, rounds)
    found["kernels"] = kernels(asked(case), rounds // 2)
    return found


def written(case: Case) -> dict[str, Callable[[], Any]]:
    """The steps by hand, which must say what the tape says.

    The sum is compared with that of the same coefficients: a clipped sum of the tape's is a little
    smaller, by what rounding could hide of the norms.
    """
    hand, tape = by_hand(case, 1.0), recorded(case)
    norms = tape.norms()
    assert float(((hand["norms"]() - norms).abs() / norms).max()) < TOLERANCE
    weighted = tape.weighted_sum(coefficients(norms, 1.0))
    assert deviation(hand["clipped sum"](), weighted) < TOLERANCE
    return hand


def parts(case: Case, rounds: int) -> dict[str, Any]:
    """Milliseconds of each part of a recorded step, beside those of a plain one."""
    net, x, y, loss = case
    names = (
        "plain forward", "plain backward", "recorded forward", "recorded backward",
        "norms", "weighted sum",
    )  # fmt: skip
    spent: dict[str, list[float]] = {name: [] for name in names}
    for done in range(rounds + 1):
        marks = [time.perf_counter()]
        losses = loss(net(x), y)
        marks.append(time.perf_counter())
        losses.sum().backward()
        marks.append(time.perf_counter())
        net.zero_grad(set_to_none=True)
        marks.append(time.perf_counter())
        with persample.record(net) as tape:
            losses = loss(net(x), y)
            marks.append(time.perf_counter())
            tape.backward(losses)
        marks.append(time.perf_counter())
        c = 1 / (1 + tape.norms())
        marks.append(time.perf_counter())
        tape.weighted_sum(c)
        marks.append(time.perf_counter())
        gaps = [b - a for a, b in itertools.pairwise(marks)]
        if done:  # the first round warms up
            for name, gap in zip(names, gaps[:2] + gaps[3:], strict=True):
                spent[name].append(gap)
    return {name: statistics.median(values) * 1e3 for name, values in spent.items()}


def measure(quick: bool) -> dict[str, Any]:
    """Everything of this page."""
    rounds = 5 if quick else ROUNDS
    torch.manual_seed(0)
    found: dict[str, Any] = {"per use": slope(layers, 4 * rounds)}
    found["per data operator"] = slope(chain, 4 * rounds)
    print(
        f"    {found['per use']['us']:.0f} µs per use, "
        f"{found['per data operator']['us']:.0f} µs per data operator",
        flush=True,
    )
    if not quick:
        found["tiny GPT-2"] = ratios(asked(tiny_gpt2()), 2 * rounds)
        print(f"    tiny GPT-2: norms {found['tiny GPT-2']['norms']:.2f} of plain", flush=True)
        found["steps"] = {}
        for name in STEPS:
            found["steps"][name] = steps(MODELS[name](), rounds)
            print(f"    steps of {name} measured", flush=True)
    found["parts"] = {}
    for name in ("cnn",) if quick else ("gpt", "resnet18"):
        found["parts"][name] = parts(MODELS[name](), 3 if quick else 7)
        print(f"    parts of {name} measured", flush=True)
    return found


if __name__ == "__main__":
    run("overhead", __doc__, measure)
