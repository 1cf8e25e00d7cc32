"""Lean recordings answer norms and sums exactly and keep nothing."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import persample
from persample.testing import oracle

from .models import MODELS, Fn, par
from .test_models import double, loss
from .test_questions import close, flat_rows


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums(name: str) -> None:
    torch.manual_seed(0)
    model, batch = double(*MODELS[name](3))
    rows = oracle(model, loss, batch, n=3)
    with persample.record(model, lean=True) as tape:
        tape.backward(loss(model, batch))
    norms = flat_rows(rows).norm(dim=1)
    close(tape.norms(), norms)
    bound = float(norms.median())
    clip = (bound / norms.clamp(min=1e-300)).clamp(max=1)
    top = max(float(g.abs().max()) for g in rows.values())
    for parameter, value in tape.clipped_sum(bound).items():
        expected = torch.tensordot(clip.to(rows[parameter].dtype), rows[parameter], 1)
        assert float((value - expected).abs().max()) <= 1e-10 * top
    c = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for parameter, value in tape.weighted_sum(c).items():
        expected = torch.tensordot(c.to(rows[parameter].dtype), rows[parameter], 1)
        assert float((value - expected).abs().max()) <= 1e-10 * top
    assert all(p.grad is None for p in model.parameters())


def test_nothing_is_kept() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    x = torch.randn(16, 10, 64)

    def factors(lean: bool) -> int:
        with persample.record(model, lean=lean) as tape:
            losses = model(x).square().mean((1, 2))
            tape.backward(losses)
        gc.collect()
        return sum(e.form.nbytes() for e in tape._ledger.entries)

    assert factors(False) > 0
    assert factors(True) == 0


def test_other_questions_are_refused() -> None:
    model, batch = double(*MODELS["mlp"](3))
    with persample.record(model, lean=True) as tape:
        tape.backward(loss(model, batch))
    with pytest.raises(persample.UsageError, match="lean"):
        tape.grads()
    with pytest.raises(persample.UsageError, match="lean"):
        tape.gram()
    with pytest.raises(persample.UsageError, match="lean"):
        persample.record(model, lean=True, verify=True)


def test_a_forward_that_is_not_used_leaves_no_trace() -> None:
    def f(s: Any, x: Tensor, first: bool) -> Tensor:
        return x @ ((s.a if first else s.b) * 2)

    model = Fn(f, a=par(5, 5), b=par(5, 5)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    rows = oracle(model, lambda m, x: m(x, False).square().sum(1), x)
    for unused in (True, False) * 10:
        with persample.record(model, lean=True) as tape:
            model(x, unused)
            tape.backward(model(x, False).square().sum(1))
        close(tape.norms(), flat_rows(rows).norm(dim=1))
