"""What a cap keeps, and what it costs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch

import persample
from persample import private
from persample.private import accounting, truncation
from persample.private.accounting import Mechanism

from .reference import sampled_delta, truncated_losses

SMALL: dict[str, Any] = {
    "noise_multiplier": 1.0, "delta": 1e-5, "size": 5000, "batch_size": 100, "steps": 150
}  # fmt: skip


@pytest.mark.parametrize(("deviations", "expected"), [(3, 3.69), (4, 1.82), (5, 1.657)])
def test_check_values(deviations: int, expected: float) -> None:
    pytest.importorskip("dp_accounting")
    cap = int(100 + deviations * math.sqrt(98))
    assert private.plan(**SMALL, cap=cap).epsilon() == pytest.approx(expected, rel=2e-3)


def test_the_default_costs_next_to_nothing() -> None:
    pytest.importorskip("dp_accounting")
    plan = private.plan(**SMALL, cap="auto")
    assert plan.cap == 160
    free = private.plan(**SMALL).epsilon()
    assert free == pytest.approx(1.65, abs=0.005)
    assert free < plan.epsilon() < 1.001 * free


def test_a_tighter_cap_costs_more() -> None:
    pytest.importorskip("dp_accounting")
    found = [private.plan(**SMALL, cap=cap).epsilon() for cap in (120, 130, 145, 160)]
    assert all(a > b for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("size", "rate", "cap"), [(5000, 0.02, 160), (10, 0.5, 10), (10, 1.0, 10), (1000, 0.001, 7)]
)
def test_default_cap(size: int, rate: float, cap: int) -> None:
    assert truncation.default_cap(size, rate) == cap


@pytest.mark.parametrize("cap", [1, 2, 3, 4, 9])
def test_kept_is_a_uniform_subset_in_order(cap: int) -> None:
    generator = torch.Generator().manual_seed(cap)
    drawn, runs = torch.tensor([2, 3, 5, 8]), 3000
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(runs):
        found = truncation.kept(drawn, torch.rand(4, generator=generator), cap=cap)
        seen[tuple(found.tolist())] += 1
    subsets = [*itertools.combinations(drawn.tolist(), min(cap, 4))]
    assert set(seen) == set(subsets)
    expected = runs / len(subsets)
    square = sum((seen[subset] - expected) ** 2 / expected for subset in subsets)
    assert square < 25  # χ² with at most 5 degrees of freedom: p < 2e-4


def test_kept_of_nothing() -> None:
    assert truncation.kept(torch.empty(0).long(), torch.empty(0), cap=3).tolist() == []


def test_who_is_kept_does_not_depend_on_the_order() -> None:
    drawn, priorities = torch.tensor([4, 1, 7]), torch.tensor([0.3, 0.1, 0.2])
    order = torch.tensor([2, 0, 1])
    first = truncation.kept(drawn, priorities, cap=2)
    second = truncation.kept(drawn[order], priorities[order], cap=2)
    assert sorted(first.tolist()) == sorted(second.tolist()) == [1, 7]


def test_kept_wants_one_priority_for_each() -> None:
    with pytest.raises(persample.UsageError, match="priorities"):
        truncation.kept(torch.arange(3), torch.rand(4), cap=2)


def test_sampled_losses_are_within_what_is_accounted() -> None:
    """And above what Poisson sampling without a cap would be charged: a cap is not free."""
    library = pytest.importorskip("dp_accounting")
    given = {"size": 40, "cap": 6, "noise": 1.0}
    losses = truncated_losses(**given, rate=0.15, steps=3, runs=20_000)  # type: ignore[arg-type]

    def accountant(cap: int | None) -> Any:
        found = library.pld.PLDAccountant(
            library.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-3
        )
        one = Mechanism(noise_multiplier=1.0, sample_rate=0.15, size=40, cap=cap)
        return found.compose(accounting.event(one, steps=3))

    capped, free = accountant(6), accountant(None)
    for epsilon in (0.5, 1.0, 2.0):
        found, error = sampled_delta(losses, epsilon)
        assert found < capped.get_delta(epsilon)
        assert found > free.get_delta(epsilon) + 3 * error
