"""Losses of what a module returns in an object, or leaves in its attributes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from persample.expanded_weights import call_for_per_sample_grads
from persample.testing import oracle, relative_error

from ..models import Fn

X = torch.randn(4, 5, dtype=torch.float64)


def model(function: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    return Fn(function, a=nn.Linear(5, 6), b=nn.Linear(6, 5)).double()


def attribute(s: Any, x: Tensor) -> Tensor:
    h = s.a(x).tanh()
    s.penalty = h.square().sum(1)
    return s.b(h)


def listed(s: Any, x: Tensor) -> Tensor:
    h = s.a(x).tanh()
    s.penalties = [h.square().sum(1), (h, 3)]
    return s.b(h)


def posterior(s: Any, x: Tensor) -> Tensor:
    h = s.a(x).tanh()
    s.posterior = Normal(h, 1.0)
    return s.b(h)


def namespace(s: Any, x: Tensor) -> Any:
    return SimpleNamespace(y=s.b(s.a(x).tanh()))


def policy(s: Any, x: Tensor) -> Any:
    return Categorical(logits=s.b(s.a(x).tanh()))


def nested(s: Any, x: Tensor) -> Any:
    mean = s.b(s.a(x).tanh())
    return mean, Independent(Normal(mean, mean.exp()), 1)


CASES: list[tuple[Callable[..., Any], Callable[[Any, Any], Tensor]]] = [
    (attribute, lambda s, y: y.sum(1) + s.penalty),
    (attribute, lambda s, y: s.penalty),
    (listed, lambda s, y: y.sum(1) + s.penalties[0] + s.penalties[1][0].sum(1)),
    (posterior, lambda s, y: y.sum(1) + s.posterior.log_prob(torch.zeros(6)).sum(1)),
    (namespace, lambda s, out: out.y.square().sum(1)),
    (policy, lambda s, out: out.log_prob(torch.tensor(3))),
    (nested, lambda s, out: out[1].log_prob(torch.ones(5)) + out[0].sum(1)),
]


@pytest.mark.parametrize(("function", "loss"), CASES)
def test_several_steps(function: Callable[..., Any], loss: Callable[[Any, Any], Tensor]) -> None:
    net = model(function)
    expected = oracle(net, lambda m, x: loss(m, m(x)), X)
    call = call_for_per_sample_grads(net)
    for _ in range(3):
        loss(net, call(X)).sum().backward()
        found = {n: getattr(p, "grad_sample", None) for n, p in net.named_parameters()}
        named = {name: rows for name, rows in expected.items() if found[name] is not None}
        assert relative_error({name: found[name] for name in named}, named) < 1e-12
        assert all(not rows.any() for name, rows in expected.items() if name not in named)
        for parameter in net.parameters():
            parameter.grad_sample = None
