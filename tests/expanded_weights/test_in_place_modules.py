"""The drop-in on modules that write to their own input: right, or torch's own refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from persample.expanded_weights import call_for_per_sample_grads

from ..models import Fn

N = 4


def relu() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(N, 3))


def itself() -> nn.Module:
    """The input is the only result."""
    return Fn(lambda s, x: x.mul_(s.scale), scale=nn.Parameter(torch.randn(N)))


def part() -> nn.Module:
    """A view of the input is written to."""

    def forward(s: Any, x: Tensor) -> Tensor:
        x[:, 1:3].mul_(s.scale)
        return s.layer(x)

    return Fn(forward, scale=nn.Parameter(torch.randn(2)), layer=nn.Linear(N, 3))


def twice() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Any:
        y = s.layer(x.sin_() * 1)
        return y, s.layer(x.add_(1).square())

    return Fn(forward, layer=nn.Linear(N, 3))


def unseen() -> nn.Module:
    """Written to without gradients: the history stays as it was."""

    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2)
        return s.layer(x)

    return Fn(forward, layer=nn.Linear(N, 3))


MODULES = [relu, itself, part, twice, unseen]
SOURCE = torch.randn(N, 2 * N, dtype=torch.float64)
GIVEN: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "whole": lambda s: (h := s[:, :N] * 1.5, h),
    "part": lambda s: ((base := s * 1.5)[:, :N], base),
    "transposed": lambda s: ((base := (s * 1.5).T.contiguous()).T[:, N:], base),
}


def run(
    call: Callable[[nn.Module], Any], build: Callable[[], nn.Module], given: str, samples: slice
) -> tuple[nn.Module, Tensor, Tensor, Any]:
    """The loss uses the result, the input after the call, and what the input is a part of."""
    torch.manual_seed(0)
    model = build().double()
    source = SOURCE[samples].clone().requires_grad_()
    h, base = GIVEN[given](source)
    out = call(model)(h)
    results = out if isinstance(out, tuple) else (out,)
    loss = sum(r.square().sum() for r in results) + (3 * h).sum() + base.pow(3).sum()
    loss.backward()
    return model, source, h.detach(), out


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("build", MODULES)
def test_a_module_that_writes_to_its_input(build: Callable[[], nn.Module], given: str) -> None:
    model, source, h, _ = run(call_for_per_sample_grads, build, given, slice(None))
    _, plain, value, _ = run(lambda m: m, build, given, slice(None))
    assert torch.equal(h, value)
    assert torch.allclose(source.grad, plain.grad)
    for i in range(N):
        alone = run(lambda m: m, build, given, slice(i, i + 1))[0]
        for mine, one in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(mine.grad_sample[i], one.grad)
            assert mine.grad is None


def test_a_result_that_is_the_input_is_the_callers_own_tensor() -> None:
    model = itself().double()
    h = torch.randn(N, N, dtype=torch.float64, requires_grad=True) * 1
    assert call_for_per_sample_grads(model)(h) is h


@pytest.mark.parametrize("build", [relu, itself, part])
def test_a_leaf_is_not_written_to(build: Callable[[], nn.Module]) -> None:
    x = torch.randn(N, N, dtype=torch.float64, requires_grad=True)
    for call in (lambda m: m, call_for_per_sample_grads):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            call(build().double())(x)


@pytest.mark.parametrize("build", [relu, itself, part])
def test_what_was_saved_before_is_not_overwritten(build: Callable[[], nn.Module]) -> None:
    for call in (lambda m: m, call_for_per_sample_grads):
        h = torch.randn(N, N, dtype=torch.float64, requires_grad=True).exp()
        out = call(build().double())(h)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_the_callers_write_after_the_call_is_noticed() -> None:
    h = torch.randn(N, N, dtype=torch.float64, requires_grad=True) * 1
    out = call_for_per_sample_grads(relu().double())(h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
