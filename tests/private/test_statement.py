"""The statement says what the plan is, no less."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from persample import private
from persample.private.statement import round_up as upwards

pytest.importorskip("dp_accounting")
GOOD: dict[str, Any] = {"noise_multiplier": 1.5, "delta": 1e-5, "steps": 20, "max_norm": 0.25}
SIZED = GOOD | {"size": 2000, "batch_size": 100}


def words(plan: private.Plan, steps: int | None = None) -> str:
    """The statement on one line."""
    return " ".join(plan.statement(steps).split())


def test_it_is_what_print_shows() -> None:
    plan = private.plan(**SIZED)
    assert str(plan) == plan.statement()
    assert str(plan).startswith("Differential privacy of this training")
    assert max(len(line) for line in str(plan).splitlines()) <= 100


def test_constants() -> None:
    plan = private.plan(**SIZED)
    found = words(plan)
    version = importlib.metadata.version("dp-accounting")
    for part in (
        f"epsilon = {upwards(plan.epsilon())} at delta = 1e-05",
        "unit one sample",
        "zero-out: data sets that differ in one sample",
        "the number of samples, 2,000, is public",
        "with probability 0.05 (expected batch 100)",
        "C = 0.25",
        "min(1, C / ‖g‖)",
        "noise multiplier 1.5, standard deviation 0.375",
        "divided by 100",
        "updates 20",
        f"dp-accounting {version}",
        "20 × PoissonSampledDpEvent(0.05, GaussianDpEvent(1.5))",
        "tuning runs",
        "pretraining and preprocessing",
        "released the model after every update",
        "not cryptographic",
    ):
        assert part in found
    assert "target" not in found


def test_a_target_is_named() -> None:
    plan = private.plan(epsilon=2, delta=1e-5, size=1000, batch_size=100, steps=5)
    assert "(target 2)" in words(plan)


def test_part_of_a_training() -> None:
    plan = private.plan(**SIZED)
    found = words(plan, 7)
    assert "updates 7 of 20 planned" in found
    assert f"epsilon = {upwards(plan.epsilon(7))} " in found
    assert "epsilon = 0 " in words(plan, 0)


def test_add_or_remove_is_said_only_where_no_size_is_known() -> None:
    assert "add-or-remove" not in words(private.plan(**SIZED))
    found = words(private.plan(**GOOD, sample_rate=0.05, divisor=100))
    assert "add-or-remove" in found
    assert "zero-out" not in found
    assert "without knowing the number of samples" in found
    assert "for accounting only" in words(private.plan(**GOOD, sample_rate=0.05))


def test_users() -> None:
    found = words(private.plan(**SIZED, unit="user"))
    assert "one user: all samples of that user together" in found
    assert "the number of users, 2,000, is public" in found
    assert "all samples of one user, added up" in found


@pytest.mark.parametrize(
    ("clipping", "part"), [("automatic", "g · C / (‖g‖ + 0.01)"), ("per_layer", "√ΣC_l² = C")]
)
def test_clipping(clipping: str, part: str) -> None:
    assert part in words(private.plan(**SIZED, clipping=clipping))


def test_bands() -> None:
    found = words(private.plan(**SIZED, bands=4))
    for part in (
        "one of 4 groups by an independent coin",
        "with probability 0.2",
        "BandMF",
        "largest column norm is 1.21",
        "5 × PoissonSampledDpEvent(0.2, GaussianDpEvent(1.5))",
    ):
        assert part in found


def test_what_a_cap_costs() -> None:
    plan = private.plan(**SIZED, cap=120)
    free = private.plan(**SIZED).epsilon()
    found = words(plan)
    assert "of more than 120 a uniform subset of 120 is kept" in found
    assert f"without the cap epsilon would be {upwards(free)}" in found
    assert plan.epsilon() > 1.1 * free


def test_no_guarantee_is_called_none() -> None:
    assert "guarantee none" in words(private.plan(**SIZED | {"noise_multiplier": 1e-6}))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.23401, "1.235"), (1.234, "1.234"), (9.9999, "10"), (123.41, "123.5"),
     (0.0012341, "0.001235"), (7.9999999, "8"), (12345.6, "1.235e+04")],
)  # fmt: skip
def test_a_published_epsilon_is_rounded_up(value: float, text: str) -> None:
    assert upwards(value) == text
    assert float(text) >= value
