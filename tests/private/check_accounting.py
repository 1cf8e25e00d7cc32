"""Accounting: closed forms, other accountants, sampled privacy losses, calibration, audits."""

from __future__ import annotations

import itertools
import json
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dp_accounting
import torch

from persample import private
from persample.private import accounting
from persample.private.accounting import Mechanism
from persample.private.guessing import guess, lower_bound

from .check import Row
from .reference import (
    banded_losses,
    gaussian_epsilon,
    own_answer,
    random_plans,
    sampled_delta,
    truncated_losses,
)

DELTA = 1e-5


def proofs() -> Iterator[Row]:
    """All of them, the fast ones first."""
    yield closed_form()
    yield monotone()
    yield from other_accountant()
    yield library_itself()
    yield from calibration()
    yield from bands()
    yield from caps()
    yield same_bound()
    yield from audits()


def epsilon(steps: int, delta: float = DELTA, **given: Any) -> float:
    return accounting.epsilon(Mechanism(**given), steps=steps, delta=delta)


def closed_form() -> Row:
    """T unsampled releases are one Gaussian release."""
    ratios = []
    grid = itertools.product((0.7, 1.0, 3.0, 10.0), (1, 10, 100), (1e-3, 1e-5, 1e-9))
    for noise, steps, delta in grid:
        exact = gaussian_epsilon(delta, math.sqrt(steps) / noise)
        found = epsilon(steps, delta, noise_multiplier=noise, sample_rate=1.0)
        ratios.append(found / exact)
    ok = min(ratios) >= 1 - 1e-6 and max(ratios) <= 1.002  # FFTs are exact to about 1e-7 here
    found = f"ratio 1 − {1 - min(ratios):.0e} … 1 + {max(ratios) - 1:.0e}"
    return Row("rate 1: the analytic Gaussian", len(ratios), found, "1 − 1e-6 … 1.002", ok)


def monotone() -> Row:
    """In the number of steps, the rate, the inverse of the noise."""
    broken, cases = 0, 0
    rates, noises, counts = (0.002, 0.02, 0.2, 1.0), (4.0, 1.5, 1.0, 0.7), (1, 10, 100, 1000)
    table = {
        (q, s, t): epsilon(t, noise_multiplier=s, sample_rate=q)
        for q, s, t in itertools.product(rates, noises, counts)
    }
    for key in table:
        for axis, values in enumerate((rates, noises, counts)):
            place = values.index(key[axis])
            if place + 1 < len(values):
                larger = (*key[:axis], values[place + 1], *key[axis + 1 :])
                cases += 1
                broken += not table[key] < table[larger]
    return Row("monotone in T, q, 1/σ", cases, f"{broken} broken", "0", broken == 0)


def other_accountant() -> Iterator[Row]:
    """Opacus' PRV accountant, whose answer is an upper bound within its eps_error."""
    try:
        from opacus.accountants import PRVAccountant
    except ImportError:
        return
    gaps = []
    grid = [*itertools.product((0.002, 0.01, 0.1), (0.8, 1.0, 2.0), (100, 2000))]
    for rate, noise, steps in grid:
        other = PRVAccountant()
        other.history = [(noise, rate, steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = other.get_epsilon(delta=DELTA, eps_error=0.01)
        gaps.append(epsilon(steps, noise_multiplier=noise, sample_rate=rate) - theirs)
    ok = min(gaps) >= -0.02 and max(gaps) <= 0.002
    found = f"ours − theirs {min(gaps):.4f} … {max(gaps):.4f}"
    yield Row("Opacus' PRV accountant, ± 0.01", len(gaps), found, "−0.02 … 0.002", ok)


def library_itself() -> Row:
    """Random plans against dp-accounting asked directly."""
    worst, count = 0.0, 0
    for given in random_plans(210, seed=2026, least_noise=0.8):
        plan = private.plan(**given)
        own = own_answer(
            rate=plan.bands * plan.sample_rate,
            noise=plan.noise_multiplier,
            count=math.ceil(plan.steps / plan.bands),
            delta=plan.delta,
        )
        worst, count = max(worst, abs(plan.epsilon() - own) / max(own, 1e-9)), count + 1
    name = "random plans: dp-accounting's own answer"
    return Row(name, count, f"largest relative gap {worst:.1e}", "≤ 1e-9, ≥ 200", worst <= 1e-9)


def calibration() -> Iterator[Row]:
    """σ for a target ε: how near, and how long it takes (processor time)."""
    ratios, times = [], []
    data = ((50_000, 512, 10), (1437, 256, 15), (1_000_000, 1000, 2))
    for target, (size, batch, epochs) in itertools.product((0.1, 0.5, 1, 3, 8, 20), data):
        started = time.process_time()
        plan = private.plan(epsilon=target, delta=1e-7, size=size, batch_size=batch, epochs=epochs)
        times.append(time.process_time() - started)
        ratios.append(plan.epsilon() / target)
    ok = min(ratios) >= 0.99 and max(ratios) <= 1
    found = f"ε/target {min(ratios):.5f} … {max(ratios):.5f}"
    yield Row("calibration reaches the target from below", len(ratios), found, "0.99 … 1", ok)
    times.sort()
    found = f"median {times[len(times) // 2]:.2f} s, largest {times[-1]:.2f} s"
    yield Row("calibration, processor time", len(times), found, "≤ 3 s", times[-1] <= 3)


def bands() -> Iterator[Row]:
    """BandMF's releases, made by the recurrence, against the accountant's δ(ε)."""
    settings = ((4, 0.05, 1.0, 40), (8, 0.02, 0.8, 64), (2, 0.25, 1.5, 12), (2, 0.25, 1.5, 11))
    for b, rate, noise, steps in settings:
        losses = banded_losses(bands=b, rate=rate, noise=noise, steps=steps, runs=400_000)
        mechanism = Mechanism(noise_multiplier=noise, sample_rate=rate, bands=b)
        accountant = dp_accounting.pld.PLDAccountant()
        accountant.compose(accounting.event(mechanism, steps=steps))
        off = []
        for value in (0.5, 1.0, 2.0, 3.0):
            found, error = sampled_delta(losses, value)
            off.append((found - accountant.get_delta(value)) / error)
        name = f"BandMF by sampling, b = {b}, q = {rate}, σ = {noise}, T = {steps}"
        # where T is no multiple of b, the last column is cut: less is released than is counted
        exact = steps % b == 0
        worst = max(map(abs, off)) if exact else max(off)
        found = f"δ off by {worst:.1f} standard errors"
        yield Row(name, len(losses), found, "≤ 4" + (" either way" if exact else ""), worst <= 4)


def caps() -> Iterator[Row]:
    """Truncated sums of a worst case: within what is accounted, above what an uncapped one is."""
    settings = ((40, 0.15, 6, 1.0, 3), (60, 0.1, 8, 0.8, 5), (30, 0.3, 9, 1.5, 8))
    for size, rate, cap, noise, steps in settings:
        losses = truncated_losses(
            size=size, rate=rate, cap=cap, noise=noise, steps=steps, runs=200_000
        )
        known = Mechanism(noise_multiplier=noise, sample_rate=rate, size=size, cap=cap)
        free = Mechanism(noise_multiplier=noise, sample_rate=rate, size=size)
        accountants = []
        for mechanism in (known, free):
            relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
            found = dp_accounting.pld.PLDAccountant(relation, value_discretization_interval=1e-3)
            accountants.append(found.compose(accounting.event(mechanism, steps=steps)))
        above, below = [], []
        for value in (0.5, 1.0, 2.0):
            delta, error = sampled_delta(losses, value)
            above.append((delta - 4 * error) / accountants[0].get_delta(value))
            below.append((delta - 4 * error) / accountants[1].get_delta(value))
        name = f"cap {cap} by sampling, n = {size}, q = {rate}, σ = {noise}, T = {steps}"
        found = f"δ {max(above):.2f} of the capped, {min(below):.2f} of the free"
        ok = max(above) < 1 < min(below)
        yield Row(name, len(losses), found, "< 1 of the capped, > 1 of the free", ok)


def same_bound() -> Row:
    """The committed scores and answers of jax-privacy."""
    cases = json.loads((Path(__file__).parent / "one_run.json").read_text())["cases"]
    gaps = []
    for case in cases:
        scores = torch.tensor(case["scores"], dtype=torch.float64)
        included = torch.tensor(case["included"])
        for answer in case["answers"]:
            chosen = scores >= answer["threshold"]
            found = lower_bound(
                canaries=len(scores),
                guesses=int(chosen.sum()),
                correct=int((chosen & included.bool()).sum()),
                delta=case["delta"],
                confidence=case["confidence"],
            )
            gaps.append(abs(found - answer["epsilon"]))
    found = f"largest gap {max(gaps):.1e}"
    return Row("one-run bound: jax-privacy's", len(gaps), found, "≤ 2e-6", max(gaps) <= 2e-6)


def audits() -> Iterator[Row]:
    """One Gaussian release, 400 canaries in directions of their own."""
    for target in (0.5, 1.0, 2.0):
        right = convicted(target, 1.0)
        name = f"audit, ε = {target}: right runs above ε"
        yield Row(name, 200, f"{right} of 200", "≤ 16", right <= 16)
        wrong = convicted(target, 0.1)
        name = f"audit, ε = {target}: a tenth of the noise"
        yield Row(name, 200, f"{wrong} of 200 convicted", "≥ 190", wrong >= 190)
        for share, factor in (("a quarter", 0.25), ("half", 0.5)):
            found = convicted(target, factor)
            name = f"audit, ε = {target}: {share} of the noise"
            yield Row(name, 200, f"{found} of 200 convicted", "(its power)", True)


def convicted(target: float, factor: float, runs: int = 200) -> int:
    """How many runs are, where the noise is ``factor`` of what the target needs."""
    scale = factor * dp_accounting.get_sigma_gaussian(target, DELTA)
    generator = torch.Generator().manual_seed(int(1000 * target * factor))
    found = 0
    for _ in range(runs):
        included = torch.rand(400, generator=generator) < 0.5
        scores = included + scale * torch.randn(400, generator=generator)
        guesses, correct = guess(scores, included)
        found += lower_bound(canaries=400, guesses=guesses, correct=correct, delta=DELTA) > target
    return found
