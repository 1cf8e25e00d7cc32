"""Passes of one block that the program may not want to be added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error

MATCH = "two backward passes in one block"
RECENT = torch.__version__ >= (2, 13)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, 4).double(), torch.randint(3, (5,))


def each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def attacked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """An adversarial example by a plain backward, whose gradients are thrown away."""
    x = x.clone().requires_grad_()
    each(model, x, y).sum().backward()
    model.zero_grad()
    assert x.grad is not None
    return (x + 0.1 * x.grad.sign()).detach()


def by_grad(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The same by torch.autograd.grad, as the refusal says."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(each(model, x, y).sum(), x)
    return (x + 0.1 * grad.sign()).detach()


def by_inputs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The same by a backward that writes to the input alone, twice."""
    x = x.clone().requires_grad_()
    losses = each(model, x, y)
    losses.sum().backward(inputs=[x], retain_graph=True)
    start = torch.autograd.backward if RECENT else Tensor.backward  # hidden from modes before
    start(losses, torch.full_like(losses, 2.0), inputs=x)
    assert x.grad is not None
    return (x + 0.3 * x.grad).detach()


@pytest.mark.parametrize("options", [{}, {"lean": True}, {"verify": True}, {"grad": True}])
def test_gradients_by_inputs_alone_are_none_of_the_answers(
    model: nn.Module, batch: tuple[Tensor, Tensor], options: dict[str, Any]
) -> None:
    x, y = batch
    for _ in range(3):
        model.zero_grad()
        with persample.record(model, **options) as tape:
            changed = by_inputs(model, x, y)
            tape.backward(each(model, changed, y))
        torch.testing.assert_close(changed, by_inputs(model, x, y))
        expected = oracle(model, lambda m, b: each(m, by_inputs(m, *b), b[1]), batch)
        assert relative_error(tape.grads(), expected) < 1e-10


def test_gradients_by_parameters_are_refused(
    model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    with persample.record(model), pytest.raises(persample.MixedSamplesError, match="by parameters"):
        each(model, *batch).sum().backward(inputs=list(model.parameters()))


@pytest.mark.parametrize("options", [{}, {"lean": True}, {"grad": True}])
@pytest.mark.parametrize("n", [1, 5])
def test_a_pass_that_was_thrown_away_is_not_added(
    model: nn.Module, batch: tuple[Tensor, Tensor], n: int, options: dict[str, Any]
) -> None:
    x, y = batch[0][:n], batch[1][:n]
    with persample.record(model, **options) as tape:
        changed = attacked(model, x, y)
        with pytest.raises(persample.UsageError, match=r"one block|a second backward"):
            tape.backward(each(model, changed, y))
    model.zero_grad()
    with persample.record(model, **options) as tape:
        tape.backward(each(model, by_grad(model, x, y), y))
    expected = oracle(model, lambda m, b: each(m, by_grad(m, *b), b[1]), (x, y))
    assert relative_error(tape.grads(), expected) < 1e-10


def test_two_plain_passes_are_refused_unless_grad_shows_that_they_are_added(
    model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch

    def both(tape: persample.Tape, between: Callable[[], Any]) -> None:
        each(model, x, y).sum().backward()
        between()
        each(model, x * 0.5, y).sum().backward()

    expected = oracle(model, lambda m, b: each(m, *b) + each(m, b[0] * 0.5, b[1]), batch)
    with persample.record(model) as tape, pytest.raises(persample.UsageError, match=MATCH):
        both(tape, model.zero_grad)
    with persample.record(model, same_samples=True) as tape:
        both(tape, lambda: None)
    assert relative_error(tape.grads(), expected) < 1e-10
    with persample.record(model, grad=True) as tape:
        both(tape, lambda: None)
    assert relative_error(tape.grads(), expected) < 1e-10
    for to_none in (True, False):
        model.zero_grad()
        with (
            persample.record(model, grad=True) as tape,
            pytest.raises(persample.UsageError, match="gradients were cleared"),
        ):
            both(tape, lambda to_none=to_none: model.zero_grad(set_to_none=to_none))


def test_what_is_refused_leaves_the_first_answers(
    model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    with persample.record(model) as tape:
        each(model, *batch).sum().backward()
        first = tape.norms()
        with pytest.raises(persample.UsageError, match=MATCH):
            tape.backward(each(model, batch[0] * 2, batch[1]))
        assert torch.equal(tape.norms(), first)


def test_several_losses_of_one_call_are_added(
    model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    with persample.record(model) as tape:
        out = model(batch[0])
        out.square().sum().backward(retain_graph=True)
        out.sin().sum().backward()
    expected = oracle(model, lambda m, x: (m(x).square() + m(x).sin()).sum(1), batch[0])
    assert relative_error(tape.grads(), expected) < 1e-10


def test_another_model_may_be_trained_in_the_block(
    model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    """Its pass reaches no recorded parameter, so it does not belong to the recording."""
    critic = nn.Linear(3, 1).double()
    expected = oracle(model, lambda m, b: each(m, *b), batch)
    with persample.record(model) as tape:
        out = model(batch[0])
        critic(out.detach()).mean().backward()
        tape.backward(F.cross_entropy(out, batch[1], reduction="none"), retain_graph=True)
        critic(out.detach()).square().sum().backward()
        weights = torch.linspace(0, 2, 5).double().unsqueeze(1)
        critic(out.detach()).backward(weights)
    assert critic.weight.grad is not None
    assert relative_error(tape.grads(), expected) < 1e-10
    assert tape.clipped_sum(1.0).keys() == expected.keys()
