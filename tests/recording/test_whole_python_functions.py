"""Python functions that are recorded whole, because they only call the operator of their name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error

from ..models import Fn, par

CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layer_norm": lambda m, h: F.layer_norm(h, (6,), m.scale, m.shift, 1e-3),
    "layer_norm by keyword": lambda m, h: F.layer_norm(h, [6], weight=m.scale, eps=1e-3),
    "layer_norm of computed weights": lambda m, h: F.layer_norm(h, (6,), 2 * m.scale, m.shift + 1),
    "relu in place": lambda m, h: F.relu(h, True),
    "relu in place by keyword": lambda m, h: F.relu(h, inplace=True),
    "relu of a weight": lambda m, h: h @ F.relu(m.weight),
    "silu": lambda m, h: F.silu(input=h),
    "silu in place": lambda m, h: F.silu(h, inplace=True),
    "dropout of nothing": lambda m, h: F.dropout(h, 0.0, True),
    "dropout of nothing in place": lambda m, h: F.dropout(h, 0.0, True, True),
    "dropout in evaluation": lambda m, h: F.dropout(h, p=0.5, training=False),
    "dropout of a weight": lambda m, h: h @ F.dropout(m.weight, 0.0),
}


def model(call: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    members = {"scale": par(6), "shift": par(6), "weight": par(6, 6)}
    layers = {"first": nn.Linear(5, 6), "last": nn.Linear(6, 3)}
    return Fn(lambda m, x: m.last(call(m, m.first(x))), **members, **layers).double()


@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_call(name: str) -> None:
    torch.manual_seed(0)
    net, x = model(CALLS[name]), torch.randn(4, 3, 5, dtype=torch.float64)

    def loss_fn(net: nn.Module, batch: Tensor) -> Tensor:
        return net(batch).square().sum((1, 2))

    with persample.record(net) as tape:
        tape.backward(loss_fn(net, x))
    assert relative_error(tape.grads(), oracle(net, loss_fn, x)) < 1e-10


def test_what_spans_the_samples_is_refused() -> None:
    net = model(lambda m, h: F.layer_norm(h, tuple(h.shape)))
    with persample.record(net) as tape, pytest.raises(persample.MixedSamplesError):
        tape.backward(net(torch.randn(4, 3, 5, dtype=torch.float64)).sum((1, 2)))
