"""Rows that a clipped sum keeps: in half of a given budget, else in what a plain step holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import persample
from persample.forms import gradients
from persample.tape import answers

N, T, D, DEPTH = 6, 48, 128, 6
ROWS = N * D * D * 4  # bytes of one layer's weight gradients


def recorded(**options: Any) -> persample.Tape:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(D, D, bias=False), nn.Softplus()) for _ in range(DEPTH)]
    model = nn.Sequential(*layers)
    with persample.record(model, **options) as tape:
        tape.backward(model(torch.randn(N, T, D)).square().sum((1, 2)))
    return tape


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of rows that each clipped sum kept."""
    seen: list[int] = []
    keep = gradients.kept_rows

    def watched(*args: Any) -> Any:
        found = keep(*args)
        seen.append(sum(form.nbytes() for form in found.values()))
        return found

    monkeypatch.setattr(gradients, "kept_rows", watched)
    return seen


def test_up_to_a_fifth_more_than_a_plain_step(kept: list[int], monkeypatch: Any) -> None:
    tape = recorded()
    held, plain = tape.explain().kept_bytes, tape._context.backward.plain_bytes
    for known, room in ((plain, plain + plain // 5 - held), (0, held // 5), (held // 2, 0)):
        tape._context.backward.plain_bytes = known
        assert room < DEPTH * ROWS  # or it would not be felt
        tape.clipped_sum(1.0)
        assert kept[-1] == max(0, room // ROWS) * ROWS
    assert kept[0]
    monkeypatch.setattr(answers, "LITTLE", DEPTH * ROWS)
    tape.clipped_sum(1.0)
    assert kept[-1] == DEPTH * ROWS  # too little to be counted


@pytest.mark.parametrize("budget", [1, 4 * ROWS, 1 << 30])
def test_half_of_a_budget(kept: list[int], budget: int) -> None:
    recorded(budget=budget).clipped_sum(1.0)
    assert kept == [min(budget // 2 // ROWS, DEPTH) * ROWS]


@pytest.mark.parametrize("budget", [1, 4 * ROWS, 1 << 30])
def test_the_answer_does_not_depend_on_it(budget: int) -> None:
    bound = float(recorded().norms().median())
    expected = recorded().clipped_sum(bound)
    for name, value in recorded(budget=budget).clipped_sum(bound).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
