"""Lean recordings answer every question of one tape exactly and keep nothing."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import persample
from persample.testing import oracle

from ..batteries.test_models import double, loss
from ..models import MODELS, Fn, par
from ..tape.test_queries import close, flat_rows


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums(name: str) -> None:
    torch.manual_seed(0)
    model, batch = double(*MODELS[name](3))
    rows = oracle(model, loss, batch, n=3)
    with persample.record(model, lean=True) as tape:
        tape.backward(loss(model, batch), retain_graph=True)
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


def test_a_sum_frees_the_graph() -> None:
    model = torch.nn.Linear(3, 2)
    with persample.record(model, lean=True) as tape:
        tape.backward(model(torch.randn(4, 3)).square().sum(1))
    norms = tape.norms()
    tape.clipped_sum(1.0, rule=persample.per_layer())
    assert torch.equal(tape.norms(), norms)
    with pytest.raises(persample.UsageError, match="retain_graph=True"):
        tape.weighted_sum(torch.ones(4))


def test_nothing_is_kept() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    x = torch.randn(16, 10, 64)

    def factors(lean: bool) -> int:
        with persample.record(model, lean=lean) as tape:
            losses = model(x).square().mean((1, 2))
            tape.backward(losses)
        gc.collect()
        kept = [] if tape._forms is None else tape._forms.contributions
        return sum(e.form.nbytes() for e in kept)

    assert factors(False) > 0
    assert factors(True) == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_other_question(name: str, ahead: bool) -> None:
    torch.manual_seed(0)
    model, batch = double(*MODELS[name](3))
    rows = oracle(model, loss, batch, n=3)
    with persample.record(model) as kept:
        kept.backward(loss(model, batch))
    direction = {name: torch.randn_like(g[0]) for name, g in rows.items()}
    lean = persample.Ahead(direction, (12, 5), True) if ahead else True
    with persample.record(model, lean=lean) as tape:
        tape.backward(loss(model, batch))
    if ahead:
        tape._passes.revisit = None  # everything is answered already
    close(tape.dots(direction), kept.dots(direction))
    close(tape.project(12, seed=5), kept.project(12, seed=5))
    for parameter, value in tape.second_moment().items():
        close(value, rows[parameter].abs().square().mean(0), 1e-9)
    for parameter, value in tape.variance().items():
        size = float(rows[parameter].abs().square().mean(0).max())
        assert float((value - rows[parameter].var(0)).abs().max()) <= 1e-10 * max(size, 1e-30)
    for parameter, value in tape.parameter_norms().items():
        close(value, flat_rows({parameter: rows[parameter]}).norm(dim=1), 1e-9)
    assert tape.noise_scale().trace == pytest.approx(kept.noise_scale().trace)
    if not ahead:
        close(tape.gram(), kept.gram())
        close(tape.cosine(), kept.cosine())
        assert tape.project(7, seed=1).shape == (3, 7)
        for parameter, value in tape.grads().items():
            close(value, rows[parameter], 1e-9)
    some = next(iter(rows))
    close(tape.dots({some: direction[some]}, params=some),
          kept.dots({some: direction[some]}, params=some), 1e-9)  # fmt: skip
    assert tape._forms is None
    assert not tape._recording.collector.consumer.waiting


def test_what_was_not_named_ahead_costs_a_pass_and_is_the_same() -> None:
    model, batch = double(*MODELS["mlp"](3))
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    with persample.record(model, lean=persample.Ahead(direction=direction)) as tape:
        tape.backward(loss(model, batch))
    other = {name: d.clone() for name, d in direction.items()}
    close(tape.dots(other), tape.dots(direction))
    some = {"0.weight": direction["0.weight"]}
    close(
        tape.dots(some, params="0.weight"),
        tape.dots({"0.weight": other["0.weight"]}, params="0.weight"),
    )


def test_a_direction_written_to_is_another() -> None:
    model, batch = double(*MODELS["mlp"](3))
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    with persample.record(model, lean=persample.Ahead(direction=direction)) as tape:
        tape.backward(loss(model, batch))
    before = tape.dots(direction)
    direction["0.weight"].mul_(3)  # a running mean of gradients, for instance
    with persample.record(model) as kept:
        kept.backward(loss(model, batch))
    close(tape.dots(direction), kept.dots(direction))
    assert not torch.allclose(tape.dots(direction), before)


def test_answers_carry_no_history_of_reentrant_checkpointing() -> None:
    torch.manual_seed(0)
    again = functools.partial(checkpoint, use_reentrant=True)
    net = Fn(
        lambda s, x: again(s.c, again(s.c, s.l(x))),
        l=torch.nn.Linear(5, 5), c=torch.nn.Conv1d(4, 4, 3, padding=1),
    ).double()  # fmt: skip
    x = torch.randn(1, 4, 5, dtype=torch.float64)
    rows = oracle(net, loss, (x,), n=1)
    with persample.record(net, lean=True) as tape:
        tape.backward(loss(net, (x,)))
    for name, found in tape.grads().items():
        assert not found.requires_grad
        close(found, rows[name])


def test_used_inside_and_outside_of_reentrant_checkpointing() -> None:
    torch.manual_seed(0)
    net = Fn(
        lambda s, x: checkpoint(s.b, s.a(s.b(x)), use_reentrant=True).tanh(),
        a=torch.nn.Linear(5, 5), b=torch.nn.Linear(5, 5),
    ).double()  # fmt: skip
    x = torch.randn(3, 5, dtype=torch.float64)
    rows = oracle(net, loss, (x,), n=3)
    with persample.record(net, lean=True) as tape:
        tape.backward(loss(net, (x,)))
    close(tape.norms(), flat_rows(rows).norm(dim=1))
    for parameter, value in tape.second_moment().items():
        close(value, rows[parameter].square().mean(0))


def test_two_backwards_are_refused() -> None:
    model, batch = double(*MODELS["mlp"](3))
    with persample.record(model, lean=True) as tape:
        tape.backward(loss(model, batch))
        with pytest.raises(persample.UsageError, match=r"tape.backward\(a \+ b\)"):
            tape.backward(loss(model, batch))
    assert tape.norms().shape == (3,)


def test_an_interrupted_backward_leaves_nothing() -> None:
    model, batch = double(*MODELS["mlp"](3))
    with persample.record(model, lean=persample.Ahead(projection=(4, 0))) as tape:
        h = model[0](*batch)
        h.register_hook(lambda g: g if again else g / (1 // 0))
        losses = model[1:](h).square().mean(1)
        again = False
        with pytest.raises(ZeroDivisionError):
            tape.backward(losses, retain_graph=True)
        again = True
        tape.backward(losses)
    with persample.record(model) as kept:
        kept.backward(loss(model, batch))
    close(tape.project(4, seed=0), kept.project(4, seed=0))


def test_asked_after_the_step() -> None:
    model, batch = double(*MODELS["mlp"](3))
    with persample.record(model, lean=True) as tape:
        tape.backward(loss(model, batch))
    with torch.no_grad():
        model[0].weight.mul_(2)
    before = tape.norms()  # taken in the first pass: the step changes nothing
    assert torch.equal(tape.norms(), before)
    for question in (tape.second_moment, tape.gram):
        with pytest.raises(persample.StaleError, match="modified"):
            question()


def test_explained() -> None:
    model, batch = double(*MODELS["mlp"](3))
    with persample.record(model, lean=True) as tape:
        tape.backward(loss(model, batch))
    told = tape.explain()
    assert {u.parameter for u in told.uses} == {name for name, _ in model.named_parameters()}
    assert all(u.kept_bytes == 0 and u.work > 0 for u in told.uses)
    assert told.without_gradient == ()


def test_what_is_refused() -> None:
    model, batch = double(*MODELS["mlp"](3))
    with persample.record(model, lean=True) as tape:
        tape.backward(loss(model, batch))
    with pytest.raises(persample.UsageError, match="lean"):
        tape.cross(tape)
    with pytest.raises(persample.UsageError, match="lean"):
        tape.positions()
    with pytest.raises(persample.UsageError, match="lean"):
        persample.record(model, lean=True, verify=True)
    with pytest.raises(persample.UsageError, match="lean"):
        persample.record(model, lean="yes")  # type: ignore[arg-type]
    with pytest.raises(persample.UsageError, match="names"):
        persample.record(model, lean=persample.Ahead(direction={}))
    with pytest.raises(persample.UsageError, match="dim"):
        persample.record(model, lean=persample.Ahead(projection=(0, 1)))


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


@pytest.mark.parametrize("again", [True, False])
def test_gradients_written_in_the_first_pass(again: bool) -> None:
    torch.manual_seed(0)
    model, batch = double(*MODELS["tied_embedding_and_head"](3))
    rows = oracle(model, loss, batch, n=3)
    with persample.record(model, lean=persample.Ahead(grads=True, again=again)) as tape:
        tape.backward(loss(model, batch))
    close(tape.norms(), flat_rows(rows).norm(dim=1))
    buffers = {name: torch.full_like(value, 7.0) for name, value in rows.items()}
    first = next(iter(rows))
    for name, value in tape.grads(params=[first], out=buffers).items():
        assert value is buffers[name]
        close(value, rows[name])
    others = [name for name in rows if name != first]
    for name, value in tape.grads(params=others).items() if others else ():
        close(value, rows[name])
    if not again:  # what was handed out is not kept
        with pytest.raises(persample.UsageError, match="again=False"):
            tape.grads()
        return
    for name, value in tape.grads().items():
        close(value, rows[name])
