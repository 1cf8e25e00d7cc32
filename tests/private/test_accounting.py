"""ε against closed forms, against dp-accounting asked directly, against another accountant."""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

import persample
from persample import private
from persample.private import accounting, search
from persample.private.accounting import Mechanism

from .reference import gaussian_epsilon, own_answer, random_plans

dp_accounting = pytest.importorskip("dp_accounting")


def mechanism(**changes: Any) -> Mechanism:
    return Mechanism(**{"noise_multiplier": 1.0, "sample_rate": 0.01} | changes)


def epsilon(steps: int = 100, delta: float = 1e-5, **changes: Any) -> float:
    return accounting.epsilon(mechanism(**changes), steps=steps, delta=delta)


# ------------------------------------------------------------------ against other answers


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (2.0, 1), (4.0, 10), (30.0, 1000)])
def test_unsampled_is_the_analytic_gaussian(noise: float, steps: int, delta: float) -> None:
    exact = gaussian_epsilon(delta, math.sqrt(steps) / noise)
    found = epsilon(steps, delta, noise_multiplier=noise, sample_rate=1.0)
    assert exact <= found * (1 + 1e-6)
    assert found == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("given", [*random_plans(20, seed=1, least_noise=1.5)])
def test_random_plans_equal_the_librarys_own_answer(given: dict[str, Any]) -> None:
    plan = private.plan(**given)
    own = own_answer(
        rate=plan.bands * plan.sample_rate,
        noise=plan.noise_multiplier,
        count=math.ceil(plan.steps / plan.bands),
        delta=plan.delta,
    )
    assert plan.epsilon() == pytest.approx(own, rel=1e-9, abs=1e-9)


GRID = [(0.01, 1.0, 1000), (0.1, 2.0, 100), (0.004, 0.8, 3000), (0.2, 2.6, 90)]


@pytest.mark.parametrize(("rate", "noise", "steps"), GRID)
@pytest.mark.filterwarnings("ignore")
def test_another_accountant_agrees(rate: float, noise: float, steps: int) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    other = accountants.PRVAccountant()
    other.history = [(noise, rate, steps)]
    theirs = other.get_epsilon(delta=1e-5, eps_error=0.01)  # an upper bound within 0.01
    ours = epsilon(steps, noise_multiplier=noise, sample_rate=rate)
    assert theirs - 0.02 <= ours <= theirs + 1e-3


def test_check_values() -> None:
    banded = mechanism(sample_rate=512 / 50_000, bands=8)
    assert accounting.epsilon(banded, steps=1000, delta=1e-5) == pytest.approx(6.38, abs=0.005)
    one = replace(banded, bands=1)  # the plan's own rate for ⌈T/b⌉ steps: wrong for bands
    assert accounting.epsilon(one, steps=125, delta=1e-5) == pytest.approx(0.79, abs=0.005)


def test_the_relation_makes_no_difference() -> None:
    assert epsilon(size=None) == epsilon(size=1000)


# ------------------------------------------------------------------ shape


def rising(values: list[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))


def test_monotone() -> None:
    noise = {"noise_multiplier": 3.0}
    assert rising([epsilon(steps, **noise) for steps in (0, 1, 2, 50, 1000)])
    assert rising([epsilon(sample_rate=rate, **noise) for rate in (0.001, 0.01, 0.2, 1.0)])
    assert rising([epsilon(noise_multiplier=1 / x) for x in (0.1, 0.3, 1.0)])
    assert rising([epsilon(delta=10.0**-k, **noise) for k in (1, 5, 12)])
    assert rising([epsilon(steps, bands=4, **noise) for steps in (0, 1, 5, 100)])


def test_a_started_round_of_bands_counts_whole() -> None:
    found = [epsilon(steps, bands=4, noise_multiplier=3.0) for steps in (5, 8, 9)]
    assert found[0] == found[1] < found[2]


def test_no_step_costs_nothing() -> None:
    assert epsilon(0) == 0.0


@pytest.mark.parametrize("changes", [{}, {"sample_rate": 1.0}, {"size": 1000, "cap": 20}])
@pytest.mark.parametrize("noise", [1e-9, 1e-2])
def test_little_noise_is_no_guarantee_and_no_memory(noise: float, changes: dict[str, Any]) -> None:
    found = epsilon(noise_multiplier=noise, **changes)
    assert found > 100


def test_a_delta_below_resolution_is_no_guarantee() -> None:
    assert epsilon(delta=1e-30) == math.inf


def test_intervals() -> None:
    def interval(steps: int, least: float = 1e-4, **changes: Any) -> float:
        return accounting.interval(mechanism(**changes), steps=steps, least=least)

    assert interval(1000) == 1e-4
    assert interval(1000, noise_multiplier=0.55) == 1e-4
    assert 1e-4 < interval(1000, noise_multiplier=0.1) < 1e-2
    assert 1e-4 < interval(1000, noise_multiplier=0.3, sample_rate=1.0) < 1e-2
    assert interval(10**6, noise_multiplier=0.1, sample_rate=1.0) == math.inf
    assert interval(1000, noise_multiplier=0.5, cap=10, size=100) > 1e-4


# ------------------------------------------------------------------ calibration

TARGETS: list[dict[str, Any]] = [
    {"target": 8.0, "sample_rate": 512 / 50_000, "steps": 977},
    {"target": 3.0, "sample_rate": 256 / 1437, "steps": 85},
    {"target": 1.0, "sample_rate": 1e-3, "steps": 1000},
    {"target": 0.25, "sample_rate": 1e-3, "steps": 5000},  # the coarse answer is far off
    {"target": 0.05, "sample_rate": 0.01, "steps": 100},
    {"target": 30.0, "sample_rate": 0.5, "steps": 100},
    {"target": 2.0, "sample_rate": 1.0, "steps": 1},
    {"target": 2.0, "sample_rate": 0.02, "steps": 50, "size": 5000, "cap": 130},
    {"target": 4.0, "sample_rate": 512 / 50_000, "steps": 1000, "bands": 8},
]


@pytest.mark.parametrize("row", TARGETS, ids=lambda row: str(row["target"]))
def test_calibration_reaches_the_target_from_below(row: dict[str, Any]) -> None:
    given = dict(row)
    target, steps = given.pop("target"), given.pop("steps")
    wanted = mechanism(**given)
    accounting.version()
    started = time.process_time()
    noise = accounting.calibrate(wanted, steps=steps, delta=1e-5, target=target)
    spent = time.process_time() - started
    reached = accounting.epsilon(replace(wanted, noise_multiplier=noise), steps=steps, delta=1e-5)
    assert 0.99 * target <= reached <= target
    assert spent < 12  # 3 s on a quiet machine: tests.private.check measures it


@pytest.mark.parametrize(("target", "delta"), [(1.0, 1e-30), (1e9, 1e-5)])
def test_what_cannot_be_reached_is_refused(target: float, delta: float) -> None:
    with pytest.raises(persample.UsageError, match=r"no noise multiplier|no guarantee") as caught:
        accounting.calibrate(mechanism(), steps=1000, delta=delta, target=target)
    assert caught.value.fix


@pytest.mark.parametrize("start", [1e-3, 1.0, 3.0, 1e3])
@pytest.mark.parametrize("power", [0.3, 1.0, 8.0])
def test_search(start: float, power: float) -> None:
    calls = []

    def function(x: float) -> float:
        calls.append(x)
        return math.inf if x < 0.01 else (5 / x) ** power

    found = search.decreasing(function, target=2.0, start=start)
    assert 0.997 * 2 <= function(found) <= 2
    assert len(calls) < 30


@pytest.mark.parametrize("above", [5.0, math.inf])
@pytest.mark.parametrize("below", [0.0, 1.0])
def test_search_refuses_a_jump_over_the_target(above: float, below: float) -> None:
    with pytest.raises(persample.UsageError, match="no noise multiplier"):
        search.decreasing(lambda x: above if x < 2 else below, target=3.0, start=1.0)


# ------------------------------------------------------------------ the library


def test_the_library_is_imported_late() -> None:
    code = (
        "import sys; from persample import private; "
        "plan = private.plan(noise_multiplier=1, delta=1e-5, sample_rate=.1, steps=3); "
        "assert 'dp_accounting' not in sys.modules and 'scipy' not in sys.modules; "
        "plan.epsilon(); assert 'dp_accounting' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(persample.UsageError, match="not installed") as caught:
        private.plan(noise_multiplier=1.0, delta=1e-5, sample_rate=0.1, steps=3)
    assert caught.value.fix == "pip install persample[private]"


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.7.1")
    with pytest.raises(persample.UsageError, match=r"0\.7\.1"):
        private.plan(noise_multiplier=1.0, delta=1e-5, sample_rate=0.1, steps=3)


def test_events() -> None:
    plan = private.plan(
        noise_multiplier=1.5, delta=1e-6, size=1000, batch_size=50, steps=10, bands=4
    )
    inner = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.5))
    assert plan.event() == dp_accounting.SelfComposedDpEvent(inner, 3)
    assert plan.event(4) == dp_accounting.SelfComposedDpEvent(inner, 1)
    capped = private.plan(
        noise_multiplier=1.5, delta=1e-6, size=1000, batch_size=50, steps=10, cap=90
    )
    truncated = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(1000, 0.05, 90, 1.5)
    assert capped.event() == dp_accounting.SelfComposedDpEvent(truncated, 10)
