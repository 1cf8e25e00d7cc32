"""What cannot be proven is refused, with what, where, why and fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample

from ..models import Fn, par

X = torch.randn(4, 5, dtype=torch.float64)


def step(model: nn.Module, loss: Callable[[nn.Module], Tensor], **options: Any) -> persample.Tape:
    with persample.record(model.double(), **options) as tape:
        tape.backward(loss(model))
    tape.grads()
    return tape


def linear() -> nn.Module:
    return nn.Linear(5, 5)


class Mixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


class MeanLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x.mean(0).expand_as(x)


def penalty(model: nn.Module) -> Tensor:
    h = model(X)
    out = model(h).square().sum(1)
    (g,) = torch.autograd.grad(out.sum(), h, create_graph=True)
    return out + g.square().sum(1)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], str]] = {
    "training batch norm": (
        lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)),
        lambda m: m(X).sum(1), "BatchNorm in training mode"),
    "batch norm without affine": (
        lambda: nn.Sequential(nn.BatchNorm1d(5, affine=False), nn.Linear(5, 5)),
        lambda m: m(X).sum(1), "BatchNorm in training mode"),
    "softmax over samples": (
        linear, lambda m: m(X).softmax(0).sum(1), "axis that holds the samples"),
    "batch mean subtracted": (linear, lambda m: (m(X) - m(X).mean(0)).square().sum(1), "sum over"),
    "samples multiplied": (linear, lambda m: (m(X) @ m(X).T).sum(1), "different places"),
    "other sample's label row": (
        linear, lambda m: (m(X) - m(X).roll(1, 0)).square().sum(1), "different samples"),
    "layer norm over the batch": (
        linear, lambda m: F.layer_norm(m(X).T, (4,)).sum(0), "axis that holds the samples"),
    "loss over time": (linear, lambda m: m(X.unsqueeze(1).expand(4, 4, 5)).sum((0, 2)), "sum over"),
    "product of sums": (
        linear, lambda m: torch.ones(5).double().scatter_reduce(
            0, torch.tensor([0, 0, 1, 1, 1]), m(X).sum(0), "prod").sum(), "used again"),
    "largest of sums": (
        linear, lambda m: torch.ones(5).double().scatter_reduce(
            0, torch.tensor([0, 0, 1, 1, 1]), m(X).sum(0), "amax").sum(), "used again"),
    "product of sums by einsum": (
        linear, lambda m: torch.einsum("na,mb->ab", m(X), m(X)).sum(), "multiplied"),
    "losses on axis 1": (linear, lambda m: m(X).square().T, "axis 0"),
    "regulariser": (linear, lambda m: m(X).square().sum() + m.weight.square().sum(), "regulariser"),
    "parameters alone": (linear, lambda m: m.weight.square().sum(1), "parameters alone"),
    "custom backward mixes": (linear, lambda m: Mixing.apply(m(X)).sum(1), "custom autograd"),
    "custom function with a parameter": (
        linear, lambda m: MeanLinear.apply(m(X), m.weight).sum(1), "no proven sum"),
    "scripted": (
        lambda: nn.Sequential(torch.jit.trace(nn.Linear(5, 5), X.float()), nn.Linear(5, 5)),
        lambda m: m(X).sum(1), "could not see"),
    "gradient by a hidden tensor": (
        lambda: nn.Linear(5, 5), penalty, "depends on the parameters was not recorded"),
    "an infinite gradient beside zeros that keep samples apart": (
        lambda: Fn(lambda s, x: torch.eye(4).double() @ s.l(x), l=nn.Linear(5, 5)),
        lambda m: m(X).sum(1) * torch.tensor([1.0, torch.inf, 1, 1]), "zero times"),
    "samples on a core axis that is counted from the end": (
        linear, lambda m: torch.ormqr(m(X)[:, :3], X[0, :3], torch.ones(4, 4).double()).sum(1),
        "samples"),
    "a sparse tensor meets a parameter": (
        linear, lambda m: m(X.to_sparse()).sum(1), "sparse"),
    "rows of one sample written to zeros": (
        lambda: Fn(lambda s, x: torch.zeros(8, 5).double().index_add(
            0, torch.tensor([4, 5]), s.l(x[2:3].expand(2, 5))).view(4, 2, 5) + s.b,
            l=nn.Linear(5, 5), b=par(5)),
        lambda m: m(X).square().sum((1, 2)), "sample"),
    "parameters joined to the batch": (
        lambda: Fn(lambda s, x: torch.cat([s.w, x]) * s.g, w=par(2, 5), g=par(5)),
        lambda m: m(X).sum(1)[:4], "no sample"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_reason(name: str) -> None:
    build, loss, phrase = REFUSED[name]
    torch.manual_seed(0)
    with pytest.raises(persample.PersampleError) as caught:
        step(build(), loss)
    assert phrase in str(caught.value)
    assert caught.value.what
    assert caught.value.fix


def test_the_message_names_the_callers_own_line() -> None:
    with pytest.raises(persample.MixedSamplesError) as caught:
        step(linear(), lambda m: m(X).cumsum(0).sum(1))  # this line
    assert "test_refusals.py" in caught.value.where
    assert "cumsum" in caught.value.where
    assert "# this line" in caught.value.where


@pytest.mark.parametrize("name", ["softmax over samples", "custom function with a parameter"])
def test_loop_answers_what_is_refused(name: str) -> None:
    build, loss, _ = REFUSED[name]
    model = build().double()
    tape = step(model, loss, unproven="loop")
    losses = loss(model)
    for i in range(4):
        found = torch.autograd.grad(losses[i], list(model.parameters()), retain_graph=True,
                                    allow_unused=True)  # fmt: skip
        for row, g in zip(tape.grads().values(), found, strict=True):
            assert torch.allclose(row[i], torch.zeros_like(row[i]) if g is None else g)
    with pytest.raises(persample.MixedSamplesError):
        tape.clipped_sum(1.0)


def test_constants_are_suggested_for_inputs_alone() -> None:
    """What was computed with parameters is no input that was taken for samples by mistake."""
    model = linear().double()
    for losses, fix in (
        (lambda h: (h @ h.T).logsumexp(1), "unproven"),
        (lambda h: h @ X[:, :1].T.expand(h.shape[1], -1), "constants="),
    ):
        with pytest.raises(persample.MixedSamplesError) as caught, persample.record(model) as tape:
            tape.mark(X)
            tape.backward(losses(model(X)))
        assert fix in caught.value.fix
        assert ("constants=" in caught.value.fix) is (fix == "constants=")


class Wrapper(nn.Parameter):
    """A parameter without numbers of its own, as of points of a manifold."""

    def __new__(cls, inner: Tensor) -> Wrapper:
        return super().__new__(cls, torch.empty(0))

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "__get__":  # an attribute
            return super().__torch_function__(func, types, args, kwargs or {})
        raise TypeError("use its inner tensor")


class TestMisuse:
    def test_a_parameter_that_wraps_the_tensor_that_is_used(self) -> None:
        model = linear().double()
        model.weight = Wrapper(nn.Parameter(torch.randn(5, 5).double()))
        with (
            pytest.raises(persample.UsageError, match="'weight' is a Wrapper"),
            persample.record(model) as tape,
        ):
            tape.backward(F.linear(X, model.weight.inner, model.bias).sum(1))

    def test_no_backward(self) -> None:
        model = linear().double()
        with persample.record(model) as tape:
            model(X)
        with pytest.raises(persample.UsageError, match="no backward"):
            tape.grads()

    def test_backward_that_was_not_seen(self) -> None:
        model = linear().double()
        with persample.record(model) as tape:
            losses = model(X).sum(1)
        with pytest.warns(persample.UnheardWarning, match="received no gradients"):
            losses.sum().backward()
        with pytest.raises(persample.UsageError, match="did not start"):
            tape.grads()

    def test_backward_after_the_tape_is_gone(self) -> None:
        model = linear().double()
        with persample.record(model) as tape:
            losses = model(X).sum(1)
        del tape
        with pytest.warns(persample.UnheardWarning, match="received no gradients"):
            losses.sum().backward()
        assert model.weight.grad is None

    def test_stepped_parameters(self) -> None:
        model = linear().double()
        with persample.record(model) as tape:
            tape.backward(model(X).sum(1))
        expected = tape.grads()
        with torch.no_grad():
            model.weight.add_(1)
        assert torch.equal(tape.grads()["weight"], expected["weight"])  # from kept factors alone

    def test_stepped_parameters_that_answers_read(self) -> None:
        model = nn.utils.parametrizations.weight_norm(linear().double())
        with persample.record(model) as tape:
            tape.backward(model(X).sum(1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        with pytest.raises(persample.StaleError, match="modified"):
            tape.norms()

    def test_closed(self) -> None:
        model = linear().double()
        with persample.record(model) as tape:
            tape.backward(model(X).sum(1))
        tape.close()
        with pytest.raises(persample.UsageError, match="closed"):
            tape.grads()

    def test_two_recorders_on_one_model(self) -> None:
        model = linear()
        with persample.record(model), pytest.raises(persample.UsageError, match="already"):
            persample.record(model).__enter__()

    def test_inside_a_transform(self) -> None:
        model = linear()

        def inside(x: Tensor) -> Tensor:
            with persample.record(model):
                return model(x)

        with pytest.raises(persample.UsageError, match="transform"):
            torch.func.vmap(inside)(X.float())

    @pytest.mark.parametrize(
        ("options", "phrase"),
        [
            ({"params": "nothing"}, "no recorded parameter"),
            ({"params": lambda name: False}, "selects no parameter"),
            ({"unproven": "guess"}, "unproven"),
            ({"n": -1}, "non-negative"),
            ({"sample_ids": torch.zeros(4)}, "needs n"),
            ({"sample_ids": [0, 0, 1], "n": 2}, "integers with one axis"),
            ({"sample_ids": torch.zeros(4), "n": 2}, "integers with one axis"),
            ({"sample_ids": torch.zeros(4, 1).long(), "n": 2}, "integers with one axis"),
            ({"n": 4.0}, "n must"),
            ({"n": True}, "n must"),
            ({"dim": "0"}, "dim must"),
            ({"dim": None}, "dim must"),
            ({"dim": -1}, "dim must be a non-negative"),
            ({"budget": 0}, "budget must"),
            ({"budget": "8GiB"}, "budget must"),
            ({"constants": None}, "constants are"),
            ({"constants": [1.5]}, "constants are"),
            ({"params": nn.Linear(2, 2)}, "params="),
            ({"params": 3}, "params="),
            ({"params": []}, "selects no parameter"),
            ({"rules": [1]}, "rules are"),
            ({"rules": {"linear": len}}, "rules are"),
            ({"lean": persample.Ahead(projection=64)}, "a projection is"),  # type: ignore[arg-type]
            ({"lean": persample.Ahead(projection=(0, 0))}, "dim must"),
        ],
    )
    def test_options(self, options: dict[str, Any], phrase: str) -> None:
        with pytest.raises(persample.UsageError, match=phrase):
            persample.record(linear(), **options)

    def test_no_losses(self) -> None:
        model = linear().double()
        with persample.record(model) as tape:
            with pytest.raises(persample.UsageError, match="carry no gradient"):
                tape.backward(model(X).detach().sum(1))
            with pytest.raises(persample.MixedSamplesError, match="no sample"):
                tape.backward(torch.ones(4, requires_grad=True) * 2)

    def test_scalar_losses_cannot_be_clipped(self) -> None:
        model = linear().double()
        with persample.record(model) as tape:
            model(X).square().sum(1).mean().backward()
        assert tape.grads()["bias"].shape == (4, 5)
        with pytest.raises(persample.UsageError, match="one loss per sample"):
            tape.clipped_sum(1.0)

    @pytest.mark.parametrize("turn", [lambda h: h.T, lambda h: h - h.mean(0), lambda h: h * 1])
    def test_marks_of_results(self, turn: Callable[[Tensor], Tensor]) -> None:
        model = linear().double()
        with persample.record(model) as tape:
            out = turn(model(X))
            with pytest.raises(persample.UsageError, match="cannot be marked"):
                tape.mark(out)
            with pytest.raises(persample.UsageError, match="cannot be marked"):
                tape.mark(model.weight)

    def test_inputs_that_leave_n_open(self) -> None:
        one, shared = X[None, :, :], torch.eye(4, dtype=torch.float64)
        model = Fn(lambda s, a, k: (k @ s.l(a)).square().sum((1, 2)), l=linear()).double()
        with persample.record(model) as tape:
            tape.backward(model(one, shared))
        assert tape.grads()["l.weight"].shape == (1, 5, 5)
        with (
            persample.record(model) as tape,
            pytest.raises(persample.UsageError, match="1 or 4") as caught,
        ):
            tape.backward(model(one, shared).sum())
        assert caught.value.where
        assert "n=" in caught.value.fix
        with persample.record(model, constants=1) as tape:
            tape.backward(model(one, shared).sum())
        assert tape.n == 1

    def test_coupling_is_remembered_where_a_view_is_written(self) -> None:
        model = linear().double()
        count = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        with persample.record(model) as tape:
            tape.mark(count)
            buffer = torch.zeros(2, 2, dtype=torch.float64)
            buffer.view(-1)[:] = model(X).square().sum(1) / count.sum()
            tape.backward(buffer.flatten())
        tape.grads()
        with pytest.raises(persample.MixedSamplesError, match="whole batch"):
            tape.clipped_sum(1.0)

    def test_coupled_losses_cannot_be_clipped(self) -> None:
        model = linear().double()
        count = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        with persample.record(model) as tape:
            tape.mark(count)
            tape.backward(model(X).square().sum(1) / count.sum())
        tape.grads()
        with pytest.raises(persample.MixedSamplesError, match="whole batch"):
            tape.clipped_sum(1.0)


def test_a_gradient_by_what_was_not_known_as_samples_names_two_ways_out() -> None:
    """Rows are picked before the model is called for the first time."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).double(), torch.randn(4, 3, dtype=torch.float64)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        energy = model(place[torch.arange(len(x))].square()).tanh()
        slope = torch.autograd.grad(energy.sum(), place, create_graph=True)[0]
        return slope.square().sum(1)

    with pytest.raises(persample.MixedSamplesError) as caught, persample.record(model) as tape:
        tape.backward(losses(model, x))
    assert "tape.mark(x)" in caught.value.fix
    assert "record(..., n=...)" in caught.value.fix
    expected = persample.testing.oracle(model, losses, x)
    with persample.record(model) as tape:
        tape.mark(x)
        tape.backward(losses(model, x))
    assert persample.testing.relative_error(tape.grads(), expected) < 1e-10
    with persample.record(model, n=4) as tape:
        tape.backward(losses(model, x))
    assert persample.testing.relative_error(tape.grads(), expected) < 1e-10
