"""Slices and derived weights that are used many times: one map, however many uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.forms import Dense, Form, Outer, Part, Total
from persample.forms.pullback import Pullback
from persample.testing import oracle, relative_error

Weight = Callable[[nn.Parameter], Tensor]


class TimeLoop(nn.Module):
    """A recurrence whose weight is taken anew, or once, from a parameter."""

    def __init__(self, derive: Weight, *, once: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(0.3 * torch.randn(8, 6, dtype=torch.float64))
        self.derive, self.once = derive, once

    def forward(self, x: Tensor) -> Tensor:
        h, weight = x[:, 0], self.derive(self.w)
        for t in range(x.shape[1]):
            weight = weight if self.once else self.derive(self.w)
            h = F.linear(h, weight)[:, :6].tanh() + x[:, t]
        return h


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def form_of(derive: Weight, *, once: bool) -> Form:
    model, x = TimeLoop(derive, once=once), torch.randn(3, 4, 6, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(losses(model, x))
    assert relative_error(tape.grads(), oracle(model, losses, x)) < 1e-10
    sizes = tape.grads()["w"].flatten(1).norm(dim=1)
    torch.testing.assert_close(tape.norms(), sizes)
    total = (0.1 / sizes).clamp(max=1).to(sizes) @ tape.grads()["w"].flatten(1)
    torch.testing.assert_close(tape.clipped_sum(0.1)["w"].flatten(), total)
    return tape._forms.forms(["w"])["w"]


@pytest.mark.parametrize("once", [True, False])
def test_a_slice_is_one_part(once: bool) -> None:
    form = form_of(lambda w: w[1:7], once=once)
    assert isinstance(form, Part)
    assert isinstance(form.form, Outer)
    assert form.form.t == 4


def test_a_weight_computed_once_is_pulled_back_once() -> None:
    form = form_of(lambda w: w / w.norm(dim=1, keepdim=True), once=True)
    assert isinstance(form, Pullback)
    assert form.form.n == 3


def test_weights_computed_anew_are_pulled_back_together() -> None:
    form = form_of(lambda w: w / w.norm(dim=1, keepdim=True), once=False)
    assert isinstance(form, Dense)


def test_different_slices_stay_apart() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 6, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            h = F.linear(x, self.w[:6])
            return F.linear(F.linear(h, self.w[2:]).tanh(), self.w[:6])

    model, x = Two(), torch.randn(3, 6, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(losses(model, x))
    assert relative_error(tape.grads(), oracle(model, losses, x)) < 1e-10
    sizes = tape.grads()["w"].flatten(1).norm(dim=1)
    torch.testing.assert_close(tape.norms(), sizes)
    form = tape._forms.forms(["w"])["w"]
    assert isinstance(form, Total)
    assert len(form.forms) == 2


class Queries(nn.Module):
    """Learned queries pass two layers and a norm before they meet any data, twice."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, repeated: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.repeated = nn.Parameter(torch.randn(3, 6)), repeated
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.unsqueeze(0)
        if self.repeated:
            queries = queries.expand(x.shape[0], -1, -1)
        hidden = self.norm(self.first(queries).tanh())
        seen = F.scaled_dot_product_attention(hidden, x, x)
        return seen + self.second(hidden) * x[:, :3]


def asked(model: nn.Module, x: Tensor, **options: Any) -> persample.Tape:
    with persample.record(model, **options) as tape:
        tape.backward(model(x).flatten(1).square().sum(1))
    return tape


def expected(model: nn.Module, x: Tensor) -> Tensor:
    rows = oracle(model, lambda m, row: m(row).flatten(1).square().sum(1), x)
    return torch.cat([g.flatten(1) for g in rows.values()], 1)


@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.parametrize("budget", [None, 4096, 200])
def test_parameters_behind_queries_are_exact_in_any_budget(
    budget: int | None, repeated: bool
) -> None:
    model, x = Queries(repeated=repeated), torch.randn(4, 5, 6, dtype=torch.float64)
    tape, g = asked(model, x, budget=budget), expected(model, x)
    torch.testing.assert_close(tape.norms(), g.norm(dim=1))
    clipped = torch.cat([v.flatten() for v in tape.clipped_sum(0.5).values()])
    torch.testing.assert_close(clipped, (0.5 / g.norm(dim=1)).clamp(max=1) @ g)
    rows = torch.cat([v.flatten(1) for v in tape.grads().values()], 1)
    torch.testing.assert_close(rows, g)
    some = tape.norms(params=["queries", "first.weight"]).square()
    sizes = [v.flatten(1).square().sum(1) for k, v in tape.grads().items() if k[0] in "qf"]
    torch.testing.assert_close(some, sizes[0] + sizes[1])


@pytest.mark.parametrize("repeated", [True, False])
def test_the_graph_behind_queries_is_walked_once(
    monkeypatch: pytest.MonkeyPatch, repeated: bool
) -> None:
    """Where they are repeated for every sample, their layers are ordinary uses."""
    model, x = Queries(repeated=repeated), torch.randn(4, 5, 6, dtype=torch.float64)
    tape, walks, walk = asked(model, x), [], torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        walks.append(len(args[1]))
        return walk(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    tape.norms()
    assert walks.count(7) == (0 if repeated else 1)
    assert len(walks) < (1 if repeated else 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_queries(dtype: torch.dtype) -> None:
    model, x = Queries(dtype), torch.randn(4, 5, 6, dtype=dtype)
    tape = asked(model, x)
    rows = torch.cat([v.float().flatten(1) for v in tape.grads().values()], 1)
    torch.testing.assert_close(tape.norms().float(), rows.norm(dim=1), rtol=2e-2, atol=1e-3)
    total = torch.cat([v.flatten() for v in tape.clipped_sum(0.01).values()])
    assert float(total.norm()) <= 4 * 0.01 * (1 + 1e-6)
