"""Slices and derived weights that are used many times: one map, however many uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.forms import Form, Outer, Part, Total
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
    return tape._ledger.forms(["w"])["w"]


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


def test_weights_computed_anew_are_pulled_back_each() -> None:
    form = form_of(lambda w: w / w.norm(dim=1, keepdim=True), once=False)
    assert isinstance(form, Total)
    assert len(form.forms) == 4


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
    form = tape._ledger.forms(["w"])["w"]
    assert isinstance(form, Total)
    assert len(form.forms) == 2
