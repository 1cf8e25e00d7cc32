"""Answers to compare with: closed forms, dp-accounting itself, privacy losses by sampling."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from persample.private import banded


def gaussian_delta(epsilon: float, scale: float) -> float:
    """δ(ε) of a Gaussian release of sensitivity/σ = ``scale``: Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)."""

    def tail(x: float) -> float:  # P[N > x]
        return 0.5 * math.erfc(x / math.sqrt(2))

    second = tail(epsilon / scale + scale / 2)
    return tail(epsilon / scale - scale / 2) - (math.exp(epsilon) * second if second else 0.0)


def gaussian_epsilon(delta: float, scale: float) -> float:
    """The ε at which that is δ."""
    return bisected(lambda epsilon: gaussian_delta(epsilon, scale) - delta, 0.0, 700.0)


def bisected(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a decreasing function is zero; ``low`` if it begins below."""
    if function(low) <= 0:
        return low
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high


def own_answer(*, rate: float, noise: float, count: int, delta: float) -> float:
    """dp-accounting's ε with its defaults: add-or-remove, discretisation 1e-4."""
    import dp_accounting
    from dp_accounting import pld

    accountant = pld.PLDAccountant()
    event: Any = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def random_plans(count: int, seed: int, *, least_noise: float) -> Iterator[dict[str, Any]]:
    """Arguments of plans, with a size or without one, with bands or without."""
    draw = random.Random(seed)
    for _ in range(count):
        size = round(10 ** draw.uniform(3, 6))
        batch = max(1, round(size * 10 ** draw.uniform(-3.5, -0.7)))
        common: dict[str, Any] = {
            "noise_multiplier": 10 ** draw.uniform(math.log10(least_noise), 1),
            "delta": 10 ** draw.uniform(-9, -6.1),
            "steps": round(10 ** draw.uniform(0, 3)),
        }
        kind = draw.choice(["size", "rate", "bands"])
        if kind == "rate":
            yield common | {"sample_rate": batch / size}
        elif kind == "bands":
            bands = draw.randint(1, min(common["steps"], size // batch, 16))
            yield common | {"size": size, "batch_size": batch, "bands": bands}
        else:
            yield common | {"size": size, "batch_size": batch}


def sampled_delta(losses: Tensor, epsilon: float) -> tuple[float, float]:
    """E[(1 − e^(ε − L))₊] over privacy losses L drawn under P, and its standard error."""
    parts = (1 - (epsilon - losses).exp()).clamp(min=0)
    return float(parts.mean()), float(parts.std() / math.sqrt(len(parts)))


def mixture_loss(shifts: Tensor, rate: float | Tensor, scale: float) -> Tensor:
    """log of ((1 − q) N(0, s²) + q N(a, s²)) / N(0, s²) at y, where ``shifts`` is (y·a − a²/2)."""
    odds = shifts / scale**2
    rates = torch.as_tensor(rate, dtype=odds.dtype)
    return torch.logaddexp(torch.log1p(-rates), torch.log(rates) + odds)


def banded_losses(*, bands: int, rate: float, noise: float, steps: int, runs: int) -> Tensor:
    """Privacy losses of what BandMF releases, for one record of norm 1 in group 0.

    The releases are made step by step as in training: clipped sum plus :func:`banded.correlated`.
    """
    generator = torch.Generator().manual_seed(bands)
    columns = banded.strategy(bands, steps)
    scale = noise * banded.column_norm(bands)
    taken = torch.zeros(runs, steps, dtype=torch.float64)
    coins = torch.rand(runs, len(range(0, steps, bands)), generator=generator)
    taken[:, ::bands] = (coins < bands * rate).double()
    past: list[Tensor] = []
    released = []
    for step in range(steps):
        white = scale * torch.randn(runs, generator=generator, dtype=torch.float64)
        past = [banded.correlated(white, past, bands=bands), *past[: bands - 2]]
        released.append(taken[:, step] + past[0])
    seen = torch.stack(released, 1) @ columns.T  # strategy · releases: white noise again
    losses = torch.zeros(runs, dtype=torch.float64)
    for step in range(0, steps, bands):
        column = columns[:, step]
        losses += mixture_loss(seen @ column - column @ column / 2, bands * rate, scale)
    return losses


def truncated_losses(
    *, size: int, rate: float, cap: int, noise: float, steps: int, runs: int
) -> Tensor:
    """Privacy losses of capped sums where one record adds 1, all others −1, against its absence.

    The adversary knows the coins of the others, but no priorities.
    """
    generator = torch.Generator().manual_seed(cap)
    counts = torch.arange(size, dtype=torch.float64)
    chances = torch.distributions.Binomial(size - 1, torch.tensor(rate).double()).log_prob(counts)
    beyond = counts >= cap
    inside = (chances.exp() * rate * cap / (counts + 1))[beyond].sum() / chances.exp()[beyond].sum()
    losses = torch.zeros(runs, dtype=torch.float64)
    for _ in range(steps):
        drawn = torch.rand(runs, size, generator=generator) < rate
        priorities = torch.rand(runs, size, generator=generator)
        priorities.masked_fill_(~drawn, 2.0)
        order = priorities.argsort(1).argsort(1)
        kept = drawn & (order < cap)
        total = kept[:, 0].double() - kept[:, 1:].double().sum(1)
        released = total + noise * torch.randn(runs, generator=generator, dtype=torch.float64)
        others = drawn[:, 1:].sum(1).double()
        full = others >= cap
        offset = released + others.clamp(max=cap)
        shift = torch.where(full, 2.0, 1.0).double()
        chance = torch.where(full, inside, torch.tensor(rate).double())
        losses += mixture_loss(offset * shift - shift**2 / 2, chance, noise)
    return losses
