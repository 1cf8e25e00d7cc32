"""What is alive during a step, and what is let go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import persample
from persample.command_line.memory import Meter
from persample.testing import oracle, relative_error

from ..models import Fn, par
from ..tape.test_queries import close, flat_rows

ONCE = persample.Ahead(again=False)


def deep() -> tuple[nn.Module, Tensor]:
    """Twelve layers with activations larger than their weights."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)]), (
        torch.randn(512, 8, 64)
    )


def convolutional() -> tuple[nn.Module, Tensor]:
    """Activations that get smaller, the largest ones near the input."""
    layers: list[nn.Module] = []
    for i, o in ((3, 32), (32, 32), (32, 32)):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers), torch.randn(32, 3, 32, 32)


def each(model: nn.Module, x: Tensor) -> Tensor:
    """One loss per sample."""
    out: Tensor = model(x).flatten(1).square().mean(1)
    return out


def peak(step: Callable[[], Any]) -> int:
    """Bytes alive at the worst moment of a step that runs for the second time."""
    step()
    with Meter() as meter:
        kept = step()
    del kept
    return meter.peak


def plain(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Forward and backward; the gradients are returned."""
    return list(torch.autograd.grad(each(model, x).sum(), list(model.parameters())))


def recorded(model: nn.Module, x: Tensor, lean: bool | persample.Ahead) -> persample.Tape:
    with persample.record(model, lean=lean) as tape:
        tape.backward(each(model, x))
    return tape


@pytest.mark.parametrize("build", [deep, convolutional])
def test_norms_need_no_more_than_a_plain_step(build: Callable[[], Any]) -> None:
    model, x = build()
    found = peak(lambda: recorded(model, x, ONCE).norms())
    assert found <= 1.02 * peak(lambda: plain(model, x))


def test_a_clipped_sum_of_a_deep_model_needs_little_more() -> None:
    model, x = deep()
    found = peak(lambda: recorded(model, x, True).clipped_sum(1.0))
    assert found <= 1.06 * peak(lambda: plain(model, x))


def test_the_graph_is_freed_where_nothing_follows() -> None:
    model, x = (part.double() for part in deep())
    norms = flat_rows(oracle(model, each, x[:3])).norm(dim=1)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for again in (True, False):
        inside: list[StorageWeakRef] = []
        handle = model[5].register_forward_hook(
            lambda m, i, out: inside.append(StorageWeakRef(out.untyped_storage()))
        )
        tape = recorded(model, x[:3], persample.Ahead(direction, again=again))
        handle.remove()
        assert [ref.expired() for ref in inside] == [not again]
        close(tape.norms(), norms)
        tape.dots(direction)
    with pytest.raises(persample.UsageError, match="again=False"):
        tape.clipped_sum(1.0)
    close(tape.norms(), norms)


def test_a_graph_that_the_user_keeps_answers_again() -> None:
    model, x = (part.double() for part in deep())
    with persample.record(model, lean=ONCE) as tape:
        tape.backward(each(model, x[:3]), retain_graph=True)
    expected = {k: g.sum(0) for k, g in oracle(model, each, x[:3]).items()}
    found = tape.weighted_sum(torch.ones(3, dtype=torch.float64))
    assert relative_error(found, expected) < 1e-12


ADDITIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "add": lambda s, h: h + s.a,
    "add, with alpha": lambda s, h: torch.add(h, s.a, alpha=2),
    "sub": lambda s, h: h - s.a,
    "sub from": lambda s, h: s.a - h,
    "rsub": lambda s, h: torch.rsub(h, s.a),
    "derived": lambda s, h: h + s.a.exp(),
    "expanded": lambda s, h: h + s.a.expand(len(h), 4),
    "looked up": lambda s, h: h + nn.functional.embedding(torch.tensor([1]), s.b),
    "cat": lambda s, h: torch.cat([h, s.a.expand(len(h), 4)], 1),
    "stack": lambda s, h: torch.stack([h, s.a.expand(len(h), 4)], 1),
    "complex": lambda s, h: torch.view_as_real(h + 1j * s.a).flatten(1),
}


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", ADDITIONS)
def test_what_is_added_is_not_kept(name: str, lean: bool) -> None:
    refs: list[StorageWeakRef] = []

    def f(s: Any, x: Tensor) -> Tensor:
        h = (x * s.c).clone()  # clone saves nothing
        refs.append(StorageWeakRef(h.untyped_storage()))
        out = ADDITIONS[name](s, h)
        if not s.training:  # torch itself allows it: no derivative reads h
            h.detach().zero_()
        return out.tanh()

    model = Fn(f, a=par(4), b=par(2, 4), c=par(4)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    expected = oracle(model, lambda m, x: m(x).square().flatten(1).sum(1), x)
    for training in (True, False):
        model.train(training)
        refs.clear()
        with persample.record(model, lean=lean) as tape:
            losses = model(x).square().flatten(1).sum(1)
            assert refs[0].expired()
            tape.backward(losses)
        assert relative_error(tape.grads(), expected) < 1e-12


def test_additions_in_place() -> None:
    def f(s: Any, x: Tensor) -> Tensor:
        h = x * s.c
        h += s.a
        h -= s.a.exp()
        return h.add_(s.b[0], alpha=3).tanh()

    model = Fn(f, a=par(4), b=par(2, 4), c=par(4)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    expected = oracle(model, each, x)
    with persample.record(model) as tape:
        tape.backward(each(model, x))
    assert relative_error(tape.grads(), expected) < 1e-12


def test_a_users_rule_for_additions_sees_the_data() -> None:
    seen: list[Tensor] = []

    def rule(use: Any, firing: Any, n: int) -> Any:
        seen.append(firing.saved[0])
        return [persample.forms.Dense(firing.grads[0])]

    model = Fn(lambda s, x: x + s.a, a=par(4))
    x = torch.randn(3, 4)
    with persample.record(model, rules={torch.add: rule}) as tape:
        tape.backward(model(x).sum(1))
    assert torch.equal(seen[0], x)


def test_what_a_custom_function_read_is_let_go() -> None:
    alive: list[int] = []
    refs: list[StorageWeakRef] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            refs.append(StorageWeakRef(x.untyped_storage()))
            alive.append(sum(not ref.expired() for ref in refs))
            return 2 * x * grad

    def f(s: Any, x: Tensor) -> Tensor:
        for _ in range(5):
            x = Square.apply(torch.tanh(x * s.a))
        return x

    model = Fn(f, a=par(4))
    with persample.record(model) as tape:
        tape.backward(model(torch.randn(3, 4)).sum(1))
    assert alive == [1] * 5
