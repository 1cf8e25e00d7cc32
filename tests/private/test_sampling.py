"""Coins: of a secret, a step and an index alone."""

from __future__ import annotations

import math

import pytest
import torch

from persample.private import keys
from persample.private.sampling import Sampler

SECRET = bytes(range(32))


def sampler(**changes: object) -> Sampler:
    known = {"secret": SECRET, "size": 1000, "rate": 0.1}
    return Sampler(**known | changes)  # type: ignore[arg-type]


def test_a_coin_depends_on_its_own_index_only() -> None:
    for step in range(5):
        few, many = sampler(size=300).drawn(step), sampler(size=1000).drawn(step)
        assert torch.equal(few, many[many < 300])


def test_steps_and_secrets_have_coins_of_their_own() -> None:
    one = sampler()
    assert torch.equal(one.drawn(3), sampler().drawn(3))
    assert not torch.equal(one.drawn(3), one.drawn(4))
    assert not torch.equal(one.drawn(3), sampler(secret=bytes(32)).drawn(3))


def test_rate_and_spread_are_those_of_independent_coins() -> None:
    sizes = torch.tensor([float(len(sampler().drawn(step))) for step in range(2000)])
    spread = math.sqrt(1000 * 0.1 * 0.9)
    assert abs(float(sizes.mean()) - 100) < 4 * spread / math.sqrt(2000)
    # a shuffling loader has no spread at all; the interval of χ² at 2000 steps is ± 13 %
    assert abs(float(sizes.var()) / spread**2 - 1) < 0.13


def test_every_record_has_the_same_rate() -> None:
    counts = torch.zeros(1000)
    for step in range(1000):
        counts[sampler().drawn(step)] += 1
    chi = float(((counts - 100) ** 2 / (1000 * 0.1 * 0.9)).sum())
    assert abs(chi - 1000) < 5 * math.sqrt(2000)


@pytest.mark.parametrize(
    ("rate", "least", "most"), [(1.0, 1000, 1000), (1e-12, 0, 0), (0.5, 400, 600)]
)
def test_rates(rate: float, least: int, most: int) -> None:
    assert all(least <= len(sampler(rate=rate).drawn(step)) <= most for step in range(20))


def test_indices_are_in_order_and_each_once() -> None:
    drawn = sampler(rate=0.5).drawn(0)
    assert drawn.dtype == torch.int64
    assert bool((drawn.diff() > 0).all())


def test_a_cap_keeps_a_uniform_subset() -> None:
    counts, total = torch.zeros(50), 0
    for step in range(3000):
        drawn = sampler(size=50, rate=0.4, cap=12).drawn(step)
        assert len(drawn) <= 12
        assert bool((drawn.diff() > 0).all())
        assert set(drawn.tolist()) <= set(sampler(size=50, rate=0.4).drawn(step).tolist())
        counts[drawn] += 1
        total += len(drawn)
    share = total / 50
    chi = float(((counts - share) ** 2 / share).sum())
    assert chi < 49 + 5 * math.sqrt(98)  # the first twelve would give thousands


def test_bands_draw_from_one_group_after_the_other() -> None:
    made, rounds = sampler(rate=0.1, bands=4), 400
    groups: list[set[int]] = [set() for _ in range(4)]
    sizes = []
    for step in range(rounds):
        drawn = made.drawn(step)
        groups[step % 4] |= set(drawn.tolist())
        sizes.append(len(drawn))
    assert sum(len(group) for group in groups) == len(set().union(*groups)) == 1000
    assert abs(sum(sizes) / rounds - 100) < 4 * 12 / math.sqrt(rounds) * 4
    assert max(len(group) for group in groups) < 330


def test_secrets_are_not_of_the_global_generator() -> None:
    torch.manual_seed(0)
    first, before = keys.fresh(), torch.get_rng_state()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(0)
    assert keys.fresh() != first


def test_purposes_do_not_share_numbers() -> None:
    one = keys.stream(SECRET, "a", 1, count=4)
    for other in (
        keys.stream(SECRET, "b", 1, count=4),
        keys.stream(SECRET, "a", 2, count=4),
        keys.stream(SECRET, "a", count=4),
    ):
        assert not bool((one == other).any())
    assert torch.equal(keys.stream(SECRET, "a", 1, count=9)[:4], one)
