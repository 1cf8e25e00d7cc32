"""Rows that a clipped sum keeps: in half of a given budget, else in a share of the tape's bytes."""

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
    model = nn.Sequential(*[nn.Linear(D, D, bias=False) for _ in range(DEPTH)])
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


def test_a_share_of_what_the_tape_holds(kept: list[int], monkeypatch: Any) -> None:
    tape = recorded()
    held = tape.explain().kept_bytes
    assert held // 4 < DEPTH * ROWS  # or the share would not be felt
    tape.clipped_sum(1.0)
    assert held // 4 - ROWS < kept[0] <= held // 4
    assert kept[0]
    monkeypatch.setattr(answers, "LITTLE", DEPTH * ROWS)
    tape.clipped_sum(1.0)
    assert kept[1] == DEPTH * ROWS  # too little to be counted


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
