"""Some of the parameters: whatever they are used with, their rows are those of all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error

from ..models import Fn, flat_loss, par


class Rounded(torch.autograd.Function):
    """Weights in steps of a learned size; both get a gradient."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(w, step)
        return (w / step).round().clamp(-4, 3) * step

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        w, step = ctx.saved_tensors
        q = w / step
        inside = (q > -4) & (q < 3)
        return g * inside, (torch.where(inside, q.round() - q, q.clamp(-4, 3)) * g).sum()


class Scaled(torch.autograd.Function):
    """A product that looks at the second factor first."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(w, scale)
        return scale.exp() * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        w, scale = ctx.saved_tensors
        return g * scale.exp(), (g * w).sum() * scale.exp()


def number(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


def on_weights(s: Any, x: Tensor) -> Tensor:
    return s.head((x @ Rounded.apply(s.w, s.step)).tanh() * s.scale)


def on_weights_twice(s: Any, x: Tensor) -> Tensor:
    return s.head((x @ Scaled.apply(Rounded.apply(s.w, s.step), s.scale)).tanh())


def on_data(s: Any, x: Tensor) -> Tensor:
    return s.head(Rounded.apply(x @ s.w, s.step.abs()).tanh() * s.scale)


def detached(s: Any, x: Tensor) -> Tensor:
    size = s.w.detach().norm() * s.scale
    return s.head((x @ (s.w / s.w.norm().detach() * size)).tanh() + s.step)


MODELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    f.__name__: f for f in (on_weights, on_weights_twice, on_data, detached)
}


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_any_of_them(name: str, lean: bool) -> None:
    torch.manual_seed(0)
    model = Fn(
        MODELS[name], w=par(5, 6), step=number(0.1), scale=number(0.3), head=nn.Linear(6, 2)
    ).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    expected = oracle(model, lambda m, x: flat_loss(m(x)), x)
    for count in range(1, 4):
        for names in combinations(("w", "step", "scale", "head.weight"), count):
            with persample.record(model, params=names, lean=lean) as tape:
                tape.backward(flat_loss(model(x)))
            found = tape.grads()
            assert relative_error(found, {k: expected[k] for k in names}) < 1e-12, names


def test_none_of_them_is_used() -> None:
    model = Fn(lambda s, x: s.head(x), w=par(5, 6), head=nn.Linear(5, 2))
    with (
        persample.record(model, params="w") as tape,
        pytest.raises(persample.UsageError, match="none of the chosen parameters"),
    ):
        tape.backward(flat_loss(model(torch.randn(4, 5))))
