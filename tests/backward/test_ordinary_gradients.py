"""``record(model, grad=True)`` leaves the ``.grad`` of the same program without persample."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error

from ..batteries.test_models import double, loss
from ..models import MODELS


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()}


def expect_equal(mine: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-10) -> None:
    assert {k for k, g in mine.items() if g is None} == {k for k, g in theirs.items() if g is None}
    for name, g in theirs.items():
        if g is not None:
            size = float(g.abs().max()) if g.numel() else 0.0
            assert float((mine[name] - g).abs().max() if g.numel() else 0.0) <= tolerance * (
                1 + size
            ), name


@pytest.mark.parametrize("options", [{}, {"lean": True}, {"unproven": "loop"}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_model(name: str, options: dict[str, Any]) -> None:
    if name == "checkpointed_reentrant" and options.get("unproven"):
        pytest.skip("reentrant checkpointing allows only a plain backward")
    torch.manual_seed(0)
    model, batch = double(*MODELS[name](3))
    twin = copy.deepcopy(model)
    loss(twin, batch).sum().backward()
    with persample.record(model, n=3, grad=True, **options) as tape:
        tape.backward(loss(model, batch))
    expect_equal(grads(model), grads(twin))
    assert relative_error(tape.grads(), oracle(twin, loss, batch, n=3)) < 1e-9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def plain(model: Net) -> None:
    model(X).square().mean().backward()


def twice(model: Net) -> None:
    out = model(X)
    out.square().sum().backward(retain_graph=True)
    out.abs().mean().backward()


def by_function(model: Net) -> None:
    torch.autograd.backward(model(X).square().sum())


def weighted(model: Net) -> None:
    out = model(X).square().sum(1)
    out.backward(torch.arange(6.0))


hidden = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch shows this call to no mode")


@pytest.mark.parametrize("step", [plain, twice, pytest.param(by_function, marks=hidden), weighted])
def test_an_unchanged_loop(step: Callable[[Net], None]) -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1) for m in (model, twin)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        step(twin)
        with persample.record(model, grad=True) as tape:
            step(model)
        expect_equal(grads(model), grads(twin), 1e-5)
        for optimizer in optimizers:
            optimizer.step()
        assert tape.norms().shape == (6,)  # from kept factors alone, also after the step
    assert model.unused.weight.grad is None


def test_accumulation_over_blocks() -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    for part in X.split(2):
        twin(part).square().sum().backward()
        with persample.record(model, grad=True) as tape:
            tape.backward(model(part).square().sum(1))
    expect_equal(grads(model), grads(twin), 1e-5)


def test_other_parameters_get_theirs_too() -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    twin(X).square().sum().backward()
    with persample.record(model, grad=True, params="b.weight") as tape:
        tape.backward(model(X).square().sum(1))
    expect_equal(grads(model), grads(twin), 1e-5)
    assert tape.names == ("b.weight",)
    assert set(tape.grads()) == {"b.weight"}
    assert {row.parameter for row in tape.explain().uses} == {"b.weight"}
    expected = oracle(twin, lambda m, x: m(x).square().sum(1), X)["b.weight"].flatten(1).norm(dim=1)
    assert torch.allclose(tape.norms(), expected.float(), rtol=1e-4)


@pytest.mark.parametrize("lean", [False, True])
def test_a_scaled_gradient_stays_scaled(lean: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    (twin(X).square().sum() * 1024).backward()
    with persample.record(model, grad=True, lean=lean) as tape:
        tape.backward(model(X).square().sum(1), scale=1024.0)
    expect_equal(grads(model), grads(twin), 1e-3)
    assert torch.allclose(
        tape.norms(), flat_norms(oracle(twin, lambda m, x: m(x).square().sum(1), X)), rtol=1e-3
    )


def flat_norms(rows: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1).float()


def test_overflow_survives() -> None:
    model = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[1.0, 2.0], [float("inf"), 1.0]])
    with persample.record(model, grad=True) as tape:
        tape.backward(model(x).squeeze(1), scale=2.0**16)
    assert not bool(torch.isfinite(model.weight.grad).all())


def test_a_failed_pass_leaves_grad_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.grad = before = torch.ones(3, 3)
    with persample.record(model, grad=True) as tape, pytest.raises(persample.MixedSamplesError):
        tape.backward(model(X).square().sum(1))
    assert model[0].weight.grad is before
    assert model[0].bias.grad is None


def test_empty_batch() -> None:
    model, twin = Net(), Net()
    twin(X[:0]).square().sum().backward()
    with persample.record(model, grad=True) as tape:
        tape.backward(model(X[:0]).square().sum(1))
    expect_equal(grads(model), grads(twin))


def test_sparse_tables_are_refused() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    with persample.record(model, grad=True) as tape, pytest.raises(persample.UsageError) as caught:
        tape.backward(model(torch.tensor([1, 2])).square().sum(1))
    assert "sparse" in str(caught.value)


def test_clipped_sums_are_not_added_to_it() -> None:
    model = Net()
    with persample.record(model, grad=True) as tape:
        tape.backward(model(X).square().sum(1))
    with pytest.raises(persample.UsageError, match="accumulate"):
        tape.set_grad(tape.clipped_sum(1.0), accumulate=True)
    tape.set_grad(tape.clipped_sum(1.0))


class TestNothingTrained:
    """A plain backward in the block without grad=True, then a step."""

    def step(self, finish: Callable[[persample.Tape], None] | None = None, **options: Any) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with persample.record(model, **options) as tape:
            model(X).square().mean().backward()
        if finish is not None:
            finish(tape)
        optimizer.step()

    def test_says_so_at_the_step(self) -> None:
        with pytest.warns(persample.UnheardWarning, match="trains nothing"):
            self.step()

    def test_says_so_once(self) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with persample.record(model):
            model(X).square().mean().backward()
        with pytest.warns(persample.UnheardWarning):
            optimizer.step()
        optimizer.step()

    def test_quiet_where_grad_is_written(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.step(grad=True)
            self.step(lambda tape: tape.set_grad(tape.weighted_sum(torch.ones(6))))

    def test_quiet_for_other_models(self) -> None:
        with persample.record(model := Net()):
            model(X).square().mean().backward()
        other = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(other.parameters(), 0.1)
        F.mse_loss(other(torch.randn(3, 2)), torch.zeros(3, 2)).backward()
        optimizer.step()


def test_an_empty_batch_still_answers_after_the_step() -> None:
    model = Net()
    with persample.record(model, grad=True) as tape:
        tape.backward(model(X[:0]).square().sum(1))
    torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1).step()
    assert tape.norms().shape == (0,)
    assert all(not g.any() for g in tape.clipped_sum(1.0).values())
