"""Small layers of one size wait for a query, and every query is answered as if they had not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error

from ..tape.test_queries import close, flat_rows


class Stack(nn.Module):
    """Layers of one size, one of another, one used twice, one without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])
        self.other, self.twice = nn.Linear(4, 3), nn.Linear(4, 4)
        self.bare = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """Some parameters are used in other ways, too."""
        for layer in (*self.same, *self.bare, self.twice):
            x = layer(x).tanh() * self.scale
        return self.other(self.twice(x))


def losses(model: nn.Module, x: Any) -> Tensor:
    """One for each sample."""
    return model(x).square().sum(1)


def recorded(model: nn.Module, x: Tensor, **options: Any) -> persample.Tape:
    """A step that repeats a learned program."""
    for _ in range(2):
        with persample.record(model, **options) as tape:
            tape.backward(losses(model, x))
    return tape


def waiting(tape: persample.Tape) -> int:
    """How many uses wait."""
    return len(tape._collector.consumer.waiting())  # type: ignore[attr-defined]


QUERIES: dict[str, Callable[[persample.Tape], Any]] = {
    "norms": lambda tape: tape.norms(),
    "some": lambda tape: tape.norms(params=["same.0.weight", "same.1.weight", "twice.bias"]),
    "each": lambda tape: tape.parameter_norms(),
    "clipped": lambda tape: tape.clipped_sum(0.5),
    "by layer": lambda tape: tape.clipped_sum(0.5, rule=persample.per_layer()),
    "weighted": lambda tape: tape.weighted_sum(torch.linspace(-1, 2, tape.n).double()),
    "gram": lambda tape: tape.gram(),
    "grads": lambda tape: tape.grads(),
    "moments": lambda tape: tape.second_moment(),
}


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("first", [None, "norms", "each"])
def test_answers_are_those_of_layers_that_do_not_wait(query: str, first: str | None) -> None:
    torch.manual_seed(0)
    model, x = Stack().double(), torch.randn(6, 4).double()
    with persample.record(model, positions=True) as tape:
        tape.backward(losses(model, x))
    assert not waiting(tape)
    expected = QUERIES[query](tape)
    tape = recorded(model, x)
    assert waiting(tape) == 11
    if first is not None:
        QUERIES[first](tape)
    torch.testing.assert_close(QUERIES[query](tape), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("n", [1, 4, 7])
def test_rows_and_norms_are_exact(n: int) -> None:
    torch.manual_seed(1)
    model, x = Stack().double(), torch.randn(n, 4).double()
    expected = oracle(model, losses, x)
    tape = recorded(model, x)
    close(tape.norms(), flat_rows(expected).norm(dim=1))
    assert relative_error(tape.grads(), expected) < 1e-12


@pytest.mark.parametrize("query", ["norms", "clipped", "weighted", "grads"])
def test_a_learned_step_gives_the_bits_of_a_first_one(query: str) -> None:
    """Else private training would not resume bit for bit: its first step is not learned."""
    model, x = Stack().double(), torch.randn(6, 4).double()
    with persample.record(model) as tape:
        tape.backward(losses(model, x))
    assert waiting(tape) == 11
    first, later = QUERIES[query](tape), QUERIES[query](recorded(model, x))
    torch.testing.assert_close(later, first, rtol=0, atol=0)


def test_an_empty_batch_and_positions_do_not_wait() -> None:
    model = Stack()
    assert not waiting(recorded(model, torch.randn(0, 4)))
    assert recorded(model, torch.randn(0, 4)).norms().shape == (0,)
    assert not waiting(recorded(model, torch.randn(3, 4), positions=True))
    assert not waiting(recorded(model.bfloat16(), torch.randn(3, 4).bfloat16()))


def test_a_second_pass_is_added_and_a_failed_one_is_not() -> None:
    torch.manual_seed(2)
    model, x = Stack().double(), torch.randn(5, 4).double()
    expected = flat_rows(oracle(model, losses, x))
    for _ in range(2):
        with persample.record(model) as tape:
            found = losses(model, x)
            tape.backward(found, retain_graph=True)
            tape.norms()
            tape.backward(found)
    close(tape.norms(), 2 * expected.norm(dim=1))
    for _ in range(2):
        with persample.record(model) as tape:
            out = losses(model, x)
            tape.backward(out, retain_graph=True)
            with pytest.raises(persample.PersampleError):
                tape.backward(out / out.sum() * out)
    close(tape.norms(), expected.norm(dim=1))


def test_a_sample_that_is_not_finite_counts_for_nothing() -> None:
    torch.manual_seed(3)
    model, x = Stack(), torch.randn(5, 4)
    x[2] = torch.nan
    rest = x[[0, 1, 3, 4]]
    expected = recorded(model, rest).clipped_sum(0.3)
    tape = recorded(model, x)
    with pytest.warns(persample.NonFiniteWarning):
        found = tape.clipped_sum(0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert tape.nonfinite().tolist() == [2]


def test_data_that_are_overwritten_are_noticed() -> None:
    model, x = Stack(), torch.randn(5, 4)
    kept: list[Tensor] = []
    model.same[2].register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    tape = recorded(model, x)
    with torch.no_grad():
        kept[-1].zero_()
    with pytest.raises(persample.StaleError):
        tape.norms()


def test_ordinary_gradients_are_left() -> None:
    torch.manual_seed(4)
    model, x = Stack().double(), torch.randn(5, 4).double()
    losses(model, x).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for _ in range(2):
        model.zero_grad()
        with persample.record(model, grad=True) as tape:
            losses(model, x).sum().backward()
    assert waiting(tape)
    found = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("frozen", ["same.0.bias", "same.0.weight"])
def test_frozen_parameters_of_a_layer_that_waited(frozen: str) -> None:
    torch.manual_seed(5)
    model, x = Stack().double(), torch.randn(5, 4).double()
    recorded(model, x).norms()
    model.get_parameter(frozen).requires_grad_(False)
    expected = oracle(model, losses, x)
    close(recorded(model, x).norms(), flat_rows(expected).norm(dim=1))
    tape = recorded(model, x, params=lambda name: name != "same.1.bias")
    del expected["same.1.bias"]
    close(tape.norms(), flat_rows(expected).norm(dim=1))
