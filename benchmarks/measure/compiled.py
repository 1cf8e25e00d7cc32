"""What a compiled recording could give: a prototype, written by hand for one model.

    python -m benchmarks.measure.compiled [--rounds 15]

A zero probe is added to the output of every layer with parameters. The compiled graph returns the
losses and the layers' inputs; the gradients by the probes are what taps receive. Norms follow in a
second compiled function. Nothing here is general: which layers, where the samples are and which
formula belongs to which layer was put in by hand.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample

N, T, D, DEPTH, CLASSES = 16, 64, 128, 4, 10


class Block(nn.Module):
    """LayerNorm and two linear layers around a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, d) to the same."""
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def build() -> tuple[nn.Sequential, Tensor, Tensor]:
    """The model, inputs and targets."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(DEPTH)], nn.Linear(D, CLASSES))
    return model, torch.randn(N, T, D), torch.randint(CLASSES, (N, T))


def losses(out: Tensor, y: Tensor) -> Tensor:
    """One per sample."""
    return F.cross_entropy(out.mT, y, reduction="none").mean(1)


def probed(
    probes: list[Tensor], p: dict[str, Tensor], x: Tensor, y: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The model as a function of probes: losses, and what every layer was given."""
    given, probe = [], iter(probes)

    def linear(name: str, h: Tensor) -> Tensor:
        given.append(h)
        return F.linear(h, p[f"{name}.weight"], p[f"{name}.bias"]) + next(probe)

    for k in range(DEPTH):
        plain = F.layer_norm(x, (D,))
        given.append(plain)
        h = plain * p[f"{k}.norm.weight"] + p[f"{k}.norm.bias"] + next(probe)
        x = x + linear(f"{k}.down", F.gelu(linear(f"{k}.up", h)))
    return losses(linear(str(DEPTH), x), y), given


def norms(grads: list[Tensor], given: list[Tensor]) -> Tensor:
    """‖gᵢ‖ over all layers; every third of a block is a LayerNorm."""
    total = torch.zeros(N)
    for k, (g, a) in enumerate(zip(grads, given, strict=True)):
        scale = k % 3 == 0 and k < 3 * DEPTH
        weight = (g * a).sum(1).square().sum(1) if scale else (g.mT @ a).square().sum((1, 2))
        total = total + weight + g.sum(1).square().sum(1)
    return total.sqrt()


def steps() -> dict[str, Callable[[], Any]]:
    """What is timed."""
    model, x, y = build()
    quick = torch.compile(model)
    values = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [D, 4 * D, D] * DEPTH + [CLASSES]
    probes = [torch.zeros(N, T, size, requires_grad=True) for size in sizes]
    forward, answer = torch.compile(probed), torch.compile(norms)

    def plain(f: Callable[[Tensor], Tensor]) -> None:
        losses(f(x), y).sum().backward()
        model.zero_grad()

    def recorded() -> Tensor:
        with persample.record(model) as tape:
            tape.backward(losses(model(x), y))
        return tape.norms()

    def prototype() -> Tensor:
        each, given = forward(probes, values, x, y)
        grads = torch.autograd.grad(each.sum(), probes)
        found: Tensor = answer(list(grads), [a.detach() for a in given])
        return found

    return {
        "plain, eager": lambda: plain(model),
        "plain, compiled": lambda: plain(quick),
        "recorded eagerly, norms": recorded,
        "prototype compiled, norms": prototype,
    }


def main() -> None:
    """Compile, compare, time in turn, print medians."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measure.compiled")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    timed = steps()
    first: dict[str, float] = {}
    for name, step in timed.items():
        start = time.perf_counter()
        step()
        first[name] = time.perf_counter() - start
    gap = timed["recorded eagerly, norms"]() - timed["prototype compiled, norms"]()
    print(f"largest difference of the two norms: {float(gap.abs().max()):.1e}")
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, step in timed.items():
            start = time.process_time()
            step()
            times[name].append(time.process_time() - start)
    for name, found in times.items():
        ratios = [a / b for a, b in zip(found, times["plain, eager"], strict=True)]
        print(
            f"{name:26s} {statistics.median(found) * 1e3:6.1f} ms  ratio "
            f"{statistics.median(ratios):.2f}  first call {first[name]:.1f} s"
        )


if __name__ == "__main__":
    main()
