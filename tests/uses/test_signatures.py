"""What is remembered of one call must not change what is recorded of another like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample
from persample.testing import oracle, relative_error

from ..models import Fn, par

Call = Callable[[Any, Tensor], Tensor]

# Two calls of the same operator on tensors of the same shapes, that differ in something else.
PAIRS: dict[str, tuple[Call, Call]] = {
    "in place": (lambda m, h: torch.mul(h, m.w), lambda m, h: (h * 1).mul_(m.w)),
    "in place, without a rule": (
        lambda m, h: torch.pow(h.exp(), m.w),
        lambda m, h: (h.exp() * 1).pow_(m.w),
    ),
    "a number's type": (
        lambda m, h: torch.add(h, m.w, alpha=1),
        lambda m, h: torch.add(h, m.w, alpha=1.0),
    ),
    "a number's sign": (
        lambda m, h: torch.sub(h, m.w, alpha=0.0) + m.w,
        lambda m, h: torch.sub(h, m.w, alpha=-2.0) + m.w,
    ),
    "by keyword": (
        lambda m, h: F.linear(h, m.a, m.w),
        lambda m, h: F.linear(h, bias=m.w, weight=m.a),
    ),
    "sides": (lambda m, h: torch.sub(h, m.w), lambda m, h: torch.sub(m.w, h)),
    "square factors": (lambda m, h: h @ m.a, lambda m, h: torch.matmul(m.a, h.mT).mT),
    "what is data": (
        lambda m, h: torch.addmm(2 * h, h, m.a),
        lambda m, h: torch.addmm(m.square, h, m.a),
    ),
    "what is derived": (lambda m, h: F.linear(h, m.a), lambda m, h: F.linear(h, 2 * m.a.mT)),
    "what is constant": (lambda m, h: h * m.w, lambda m, h: h * m.w.detach()),
    "normalised axes": (
        lambda m, h: F.layer_norm(h, (4,), m.w, m.w, 1e-5),
        lambda m, h: F.layer_norm(h, (4,), m.w, m.w, 0.5),
    ),
    "the same twice": (lambda m, h: F.linear(h, m.a, m.w), lambda m, h: F.linear(h, m.a, m.a[0])),
}


def loss_fn(net: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = net(batch).square().flatten(1).sum(1)
    return out


def net_of(call: Call, dtype: torch.dtype = torch.float64) -> nn.Module:
    members = {"a": par(4, 4), "w": par(4), "square": par(1, 4)}
    return Fn(lambda m, x: call(m, m.first(x)), first=nn.Linear(3, 4), **members).to(dtype)


def expect_exact(net: nn.Module, x: Tensor, tolerance: float = 1e-10) -> None:
    expected = oracle(net, loss_fn, x)
    for _ in range(2):  # as it is learned, and by what was learned
        with persample.record(net) as tape:
            tape.backward(loss_fn(net, x))
        assert relative_error(tape.grads(), expected) < tolerance
        assert relative_error(tape.grads(), expected) < tolerance  # asked again
        sizes = sum(g.flatten(1).square().sum(1) for g in expected.values())
        torch.testing.assert_close(tape.norms().square(), sizes, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_calls_that_differ_in_one_thing(name: str, swapped: bool) -> None:
    torch.manual_seed(0)
    one, two = reversed(PAIRS[name]) if swapped else PAIRS[name]
    x = torch.randn(5, 3, dtype=torch.float64)
    for call in (one, two, one, lambda m, h: two(m, one(m, h)), lambda m, h: one(m, two(m, h))):
        expect_exact(net_of(call), x)


def test_other_dtypes_and_batches() -> None:
    net = net_of(lambda m, h: F.linear(h, m.a, m.w))
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.float64, 1e-10)):
        for n in (5, 2, 5):
            expect_exact(net.to(dtype), torch.randn(n, 3, dtype=dtype), tolerance)


def test_selection_and_freezing() -> None:
    net, x = net_of(lambda m, h: F.linear(h, m.a, m.w)), torch.randn(5, 3, dtype=torch.float64)
    expected = oracle(net, loss_fn, x)
    for chosen in ({"a", "w"}, {"w"}, {"a"}, {"first.weight", "w"}):
        with persample.record(net, params=chosen) as tape:
            tape.backward(loss_fn(net, x))
        wanted = {name: rows for name, rows in expected.items() if name in chosen}
        assert relative_error(tape.grads(), wanted) < 1e-10
    net.a.requires_grad_(False)
    expect_exact(net, x)


def test_positions_and_loops_after_ordinary_recordings() -> None:
    net = net_of(lambda m, h: F.linear(h, m.a, m.w))
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    expected = oracle(net, loss_fn, x)
    expect_exact(net, x)
    options: list[dict[str, Any]] = [
        {"positions": True}, {"verify": True}, {"unproven": "loop"}, {"lean": True},
    ]  # fmt: skip
    for option in options:
        with persample.record(net, **option) as tape:
            tape.backward(loss_fn(net, x))
        assert relative_error(tape.grads(), expected) < 1e-10


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_behind_parameters_that_are_left_out() -> None:
    def twice(m: Any, x: Tensor) -> Tensor:
        inside = checkpoint(lambda h: (h * m.w).tanh(), m.first(x), use_reentrant=True)
        out: Tensor = inside * m.w
        return out

    net, x = Fn(twice, first=nn.Linear(3, 4), w=par(4)).double(), torch.randn(5, 3).double()
    expect_exact(net, x)
    refused = pytest.raises(persample.UsageError, match="no gradient reaches")
    with refused, persample.record(net, params="w"):
        loss_fn(net, x)
    with persample.record(net, params=["w", "first.bias"]) as tape:
        tape.backward(loss_fn(net, x))
    expected = oracle(net, loss_fn, x)
    assert relative_error(tape.grads(params="w"), {"w": expected["w"]}) < 1e-10


RANDOM: dict[str, Call] = {
    "attention": lambda m, x: F.scaled_dot_product_attention(m.a, x, x, dropout_p=0.5),
    "leaky": lambda m, x: F.rrelu(m.a + 0 * x, 0.1, 0.9, training=True),
    "leaky, of a parameter and data": lambda m, x: F.rrelu(x * m.w, 0.1, 0.9, training=True),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_drawn_again_as_they_were(name: str) -> None:
    """A use that was seen before keeps its own state of the generator."""
    torch.manual_seed(0)
    net = Fn(RANDOM[name], w=par(4), a=par(4, 4)).double()
    x = torch.randn(3, 4, 4, dtype=torch.float64)
    named = {"a": net.a, "w": net.w}
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        losses = loss_fn(net, x)
        rows = [
            torch.autograd.grad(each, list(named.values()), None, True, materialize_grads=True)
            for each in losses
        ]
        expected = {
            key: torch.stack(g) for key, g in zip(named, zip(*rows, strict=True), strict=True)
        }
        torch.manual_seed(seed)
        with persample.record(net) as tape:
            tape.backward(loss_fn(net, x))
        torch.manual_seed(7)
        assert relative_error(tape.grads(), expected) < 1e-10
