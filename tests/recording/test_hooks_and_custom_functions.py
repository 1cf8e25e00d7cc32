"""Weights whose gradients pass through hooks or custom functions: every answer is of rows."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.expanded_weights import call_for_per_sample_grads
from persample.testing import oracle, relative_error

from ..models import Fn, par

Change = Callable[[Tensor], Tensor]
CHANGES: dict[str, Change] = {
    "scaled": lambda g: 2 * g,
    "clamped": lambda g: g.clamp(-0.1, 0.1),
    "signs": lambda g: g.sign(),
    "normed": lambda g: g / (1 + g.norm()),
    "normed by a number": lambda g: g / (1 + g.norm().item()),
}


def copied(w: Tensor) -> Tensor:
    return w * 1


def with_history(w: Tensor) -> Tensor:
    with torch.enable_grad():
        return w * 1


def function_of(change: Change, made: Change = copied) -> Any:
    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            return made(w)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return change(grad)

    return Changed.apply


def hooked(change: Change, made: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply(w: Tensor) -> Tensor:
        w = made(w)
        w.register_hook(change)
        return w

    return apply


WAYS: dict[str, Callable[[Change], Callable[[Tensor], Tensor]]] = {
    "function": function_of,
    "function that returns its argument": lambda change: function_of(change, lambda w: w),
    "function that returns a view": lambda change: function_of(change, lambda w: w[:]),
    "function that enables gradients": lambda change: function_of(change, with_history),
    "hook": lambda change: hooked(change, lambda w: w * 1),
    "hook on a view": lambda change: hooked(change, lambda w: w.t()),
}
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "once": F.linear,
    "twice": lambda x, w: F.linear(F.linear(x, w).tanh(), w),
    "in two ways": lambda x, w: F.linear(F.linear(x, 2 * w).tanh(), w.t()),
    "in pieces": lambda x, w: F.linear(x, w[:2]) * F.linear(x, w[2:]),
}


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_every_question_is_asked_of_rows(change: str, way: str, use: str, lean: bool) -> None:
    torch.manual_seed(0)
    prepare = WAYS[way](CHANGES[change])
    model = Fn(lambda s, x: USES[use](x, prepare(s.w)), w=par(4, 4)).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    rows = oracle(model, losses, x)["w"]
    with persample.record(model, lean=lean) as tape:
        tape.backward(losses(model, x), retain_graph=True)
    flat, c = rows.flatten(1), torch.tensor([0.5, 1.0, -2.0, 3.0]).double()
    direction = torch.randn(4, 4, dtype=torch.float64)
    assert relative_error(tape.grads(), {"w": rows}) < 1e-10
    assert torch.allclose(tape.norms(), flat.norm(dim=1))
    assert torch.allclose(tape.gram(), flat @ flat.T)
    assert torch.allclose(tape.dots({"w": direction}), (rows * direction).sum((1, 2)))
    assert torch.allclose(tape.variance()["w"], rows.var(0), atol=1e-9)
    assert torch.allclose(tape.weighted_sum(c)["w"], torch.einsum("n,nij->ij", c, rows))
    limit = float(flat.norm(dim=1).median())
    scale = (limit / flat.norm(dim=1)).clamp(max=1)
    clipped = torch.einsum("n,nij->ij", scale, rows)
    assert torch.allclose(tape.clipped_sum(limit)["w"], clipped, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("use", USES)
def test_expanded_weights_too(use: str) -> None:
    prepare = function_of(CHANGES["clamped"])
    model = Fn(lambda s, x: USES[use](x, prepare(s.w)), w=par(4, 4)).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    rows = oracle(model, losses, x)["w"]
    call = call_for_per_sample_grads(model)
    call(x).square().sum().backward()
    assert torch.allclose(model.w.grad_sample, rows)


def test_a_hook_on_an_expanded_weight_is_refused() -> None:
    def body(s: nn.Module, x: Tensor) -> Tensor:
        token = s.w.expand(x.shape[0], -1, -1)
        token.register_hook(lambda g: 2 * g)
        return torch.cat([token, x], 1).flatten(1)

    model = Fn(body, w=par(1, 1, 4)).double()
    with persample.record(model) as tape:
        tape.backward(model(torch.randn(4, 3, 4).double()).square().sum(1))
    with pytest.raises(persample.UsageError, match="expanded"):
        tape.grads()


def test_a_second_backward_is_refused() -> None:
    prepare = function_of(CHANGES["clamped"])
    model = Fn(lambda s, x: F.linear(x, prepare(s.w)), w=par(4, 4)).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(losses(model, x))
        with pytest.raises(persample.UsageError, match="a second backward"):
            tape.backward(losses(model, x))


class OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, 1).t() @ x.flatten(0, 1)


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "custom function of weights": lambda s, x: F.linear(x, function_of(CHANGES["clamped"])(s.w)),
    "custom function of both": lambda s, x: OwnLinear.apply(x, s.w),
}


@pytest.mark.parametrize("name", BODIES)
def test_positions_are_refused(name: str) -> None:
    model = Fn(BODIES[name], w=par(4, 4)).double()
    with persample.record(model, positions=True) as tape:
        tape.backward(model(torch.randn(3, 5, 4).double()).square().sum((1, 2)))
    with pytest.raises(persample.UsageError, match="custom"):
        tape.positions()


ROWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "one row for each position": lambda m, x: m.table(torch.arange(6)),
    "seen through a view": lambda m, x: m.table(torch.arange(6)).unsqueeze(0),
    "repeated for every sample": lambda m, x: m.table(torch.arange(6).repeat(len(x), 1)),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_a_table_that_a_hook_changes(rows: str, late: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        picked = ROWS[rows](m, x)
        out = m.last((x + picked).sin()) if late else None
        picked.register_hook(lambda g: g.clamp(-0.05, 0.05))
        return m.last((x + picked).sin()).sum(1) if out is None else out.sum(1)

    torch.manual_seed(0)
    model = Fn(forward, table=nn.Embedding(6, 4), last=nn.Linear(4, 3)).double()
    x = torch.randn(5, 6, 4, dtype=torch.float64)
    expected = oracle(model, losses, x)
    with persample.record(model) as tape:
        tape.backward(losses(model, x))
    assert relative_error(tape.grads(), expected) < 1e-10
    sizes = sum(g.flatten(1).square().sum(1) for g in expected.values())
    torch.testing.assert_close(tape.norms().square(), sizes)


class OwnSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.square().sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


class CrossedSum(OwnSum):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0].flip(0)


class PlainSum(OwnSum):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.expand_as(ctx.saved_tensors[0])


@pytest.mark.parametrize("total", [OwnSum, PlainSum])
def test_a_function_may_add_up_over_samples(total: Any) -> None:
    model, x = nn.Linear(4, 4).double(), torch.randn(4, 4, dtype=torch.float64)
    expected = oracle(model, lambda model, x: total.apply(model(x))[None], x)
    with persample.record(model) as tape:
        tape.backward(total.apply(model(x)))
    assert relative_error(tape.grads(), expected) < 1e-10


def test_a_sum_whose_backward_exchanges_samples_is_refused() -> None:
    model, x = nn.Linear(4, 4).double(), torch.randn(4, 4, dtype=torch.float64)
    with persample.record(model) as tape:
        total = CrossedSum.apply(model(x))
        with pytest.raises(persample.MixedSamplesError, match="CrossedSum"):
            tape.backward(total)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        g = g * torch.rand(g.shape, dtype=g.dtype)
        return g @ w.t(), x.t() @ g


def test_random_numbers_of_a_backward_are_those_of_its_own_run() -> None:
    model = Fn(lambda s, x: Noisy.apply(x @ s.v, s.w), v=par(4, 4), w=par(4, 4)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.manual_seed(1)
    with persample.record(model) as tape:
        tape.backward(losses(model, x))
    after = torch.get_rng_state()
    torch.manual_seed(1)
    losses(model, x).sum().backward()
    assert torch.equal(after, torch.get_rng_state())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(tape.grads()[name].sum(0), parameter.grad)


@pytest.mark.parametrize("options", [{"verify": True}, {"unproven": "loop"}])
def test_functions_of_raw_data_are_seen_in_verified_passes(options: dict[str, Any]) -> None:
    model = Fn(lambda s, x: OwnLinear.apply(x, s.w).sum(1), w=par(4, 4)).double()
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    expected = oracle(model, losses, x)
    with persample.record(model, **options) as tape:
        tape.backward(losses(model, x))
    assert relative_error(tape.grads(), expected) < 1e-10
    assert not tape._forms.looped


@pytest.mark.parametrize("options", [{}, {"lean": True}, {"unproven": "loop"}])
def test_graphs_with_code_of_the_users_own_go_with_the_tape(options: dict[str, Any]) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def forward(s: Any, x: Tensor) -> Tensor:
        h = x @ s.v
        h.register_hook(lambda g: 2 * g)
        same = function_of(CHANGES["scaled"], lambda t: t)(h)
        w = function_of(CHANGES["scaled"], lambda t: t)(s.w)
        w.register_hook(lambda g: 2 * g)
        alive.extend(weakref.ref(t) for t in (h, same, w))
        return OwnLinear.apply(same[:, None], s.w * 1)[:, 0] @ w

    model = Fn(forward, v=par(4, 4), w=par(4, 4)).double()
    with persample.record(model, **options) as tape:
        found = losses(model, torch.randn(5, 4, dtype=torch.float64))
        tape.backward(found, retain_graph=True)
    tape.grads()
    del tape, found
    assert not any(ref() is not None for ref in alive)


@pytest.mark.filterwarnings("ignore::persample.NonFiniteWarning")
def test_a_sample_that_is_not_finite_spoils_no_other_in_a_custom_function() -> None:
    """It would be multiplied by zero in the runs for all others, and they would count for zero."""
    net = Fn(lambda s, x: Noisy.apply(s.first(x), s.w), first=nn.Linear(4, 4), w=par(4, 3))
    x = torch.randn(5, 4)
    x[2] = math.nan
    refused = pytest.raises(persample.MixedSamplesError, match="no finite gradient")
    with refused, persample.record(net) as tape:
        tape.backward(net(x).square().sum(1))
    x[2] = 0
    with persample.record(net) as tape:
        losses = net(x).square().sum(1)
        losses = losses * torch.tensor([1, 1, math.inf, 1, 1])  # its own gradient alone
        tape.backward(losses)
    assert torch.isfinite(tape.norms()).tolist() == [True, True, False, True, True]
