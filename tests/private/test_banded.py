"""The strategy, its columns, and the recurrence that inverts it."""

from __future__ import annotations

import math

import pytest
import torch

import persample
from persample.private import accounting, banded
from persample.private.accounting import Mechanism

from .reference import banded_losses, sampled_delta


def test_coefficients_are_those_of_the_series() -> None:
    """1/√(1 − x) = Σ binom(2k, k) (x/4)ᵏ."""
    exact = [math.comb(2 * k, k) / 4**k for k in range(40)]
    assert banded.coefficients(40) == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("steps", [1, 2, 7, 30])
def test_all_bands_are_the_square_root_of_the_prefix_sum(steps: int) -> None:
    root = banded.strategy(steps, steps)
    prefix = torch.ones(steps, steps, dtype=torch.float64).tril()
    torch.testing.assert_close(root @ root, prefix)


@pytest.mark.parametrize(("bands", "steps"), [(1, 5), (2, 2), (3, 7), (4, 4), (8, 30)])
def test_column_norms(bands: int, steps: int) -> None:
    strategy = banded.strategy(bands, steps)
    norms = strategy.norm(dim=0)
    assert float(norms.max()) == pytest.approx(banded.column_norm(bands))
    assert float(norms[0]) == float(norms.max())
    assert not strategy.triu(1).any()
    assert not strategy.tril(-bands).any()
    # columns that are b apart do not overlap: parts of one record are releases of their own
    gram = strategy.T @ strategy
    for start in range(bands):
        chosen = gram[start::bands, start::bands]
        torch.testing.assert_close(chosen, torch.diag(chosen.diag()))


@pytest.mark.parametrize(("bands", "steps"), [(1, 4), (2, 5), (3, 3), (5, 17), (16, 20)])
def test_the_recurrence_inverts_the_strategy(bands: int, steps: int) -> None:
    white = torch.randn(steps, 3, 2, dtype=torch.float64)
    past: list[torch.Tensor] = []
    found = []
    for step in range(steps):
        kept = white[step].clone()
        now = banded.correlated(white[step], past, bands=bands)
        assert torch.equal(white[step], kept)
        found.append(now)
        past = [now, *past][: bands - 1]
    again = torch.tensordot(banded.strategy(bands, steps), torch.stack(found), 1)
    torch.testing.assert_close(again, white)


def test_one_band_is_the_noise_itself() -> None:
    white = torch.randn(4)
    found = banded.correlated(white, [torch.ones(4)], bands=1)
    assert torch.equal(found, white)
    assert found.data_ptr() != white.data_ptr()
    assert banded.column_norm(1) == 1.0


def test_more_past_than_bands_is_ignored() -> None:
    white, past = torch.randn(4), [torch.randn(4) for _ in range(5)]
    assert torch.equal(
        banded.correlated(white, past, bands=3), banded.correlated(white, past[:2], bands=3)
    )


def test_noise_of_another_shape_is_refused() -> None:
    with pytest.raises(persample.UsageError, match="follows noise"):
        banded.correlated(torch.zeros(2), [torch.zeros(1)], bands=2)


def test_groups_take_turns() -> None:
    assert [banded.group(step, bands=3) for step in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("bands", [2, 4, 8])
def test_prefix_sums_get_less_noise_for_one_part_of_a_record(bands: int) -> None:
    """What bands are for: the error of Σ gₜ at equal noise multiplier."""
    prefix = torch.ones(64, 64, dtype=torch.float64).tril()

    def error(b: int) -> float:
        return float((prefix @ banded.strategy(b, 64).inverse()).norm()) * banded.column_norm(b)

    assert error(bands) < 0.95 * error(1)


def test_sampled_losses_agree_with_the_accountant() -> None:
    library = pytest.importorskip("dp_accounting")
    losses = banded_losses(bands=3, rate=0.1, noise=1.0, steps=9, runs=40_000)
    accountant = library.pld.PLDAccountant()
    mechanism = Mechanism(noise_multiplier=1.0, sample_rate=0.1, bands=3)
    accountant.compose(accounting.event(mechanism, steps=9))
    for epsilon in (0.5, 1.0, 2.0):
        found, error = sampled_delta(losses, epsilon)
        assert found == pytest.approx(accountant.get_delta(epsilon), abs=4 * error)
