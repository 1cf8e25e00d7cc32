"""The contract of the drop-in: names, arguments, grad_sample, errors, users' own rules."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.expanded_weights import call_for_per_sample_grads
from persample.testing import oracle, relative_error

from ..api.test_nothing_is_left_behind import snapshot, tensors
from ..models import Fn

X = torch.randn(4, 5, dtype=torch.float64)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def found(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad_sample for name, p in model.named_parameters() if p.requires_grad}


# ---------------------------------------------------------------- building and calling


@pytest.mark.parametrize(
    ("module", "options", "text"),
    [
        ("no module", {"loss_reduction": ""}, "Expected loss_reduction argument to be sum or mean"),
        ("no module", {"batch_size": 6.4}, "Module passed must be nn.Module"),
        (nn.Linear(2, 2), {"batch_size": 6.4}, "Batch size passed must be None or an integer"),
        (nn.Linear(2, 2), {"batch_size": 0}, "Batch size must be positive"),
    ],
)
def test_what_building_refuses_in_this_order(module: Any, options: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match=text) as caught:
        call_for_per_sample_grads(module, **options)
    assert "test_contract.py" in caught.value.where
    assert caught.value.fix


def test_building_refuses_what_was_not_cleared() -> None:
    model = net()
    call_for_per_sample_grads(model)(X).sum().backward()
    with pytest.raises(RuntimeError, match="incorrect for multiple calls") as caught:
        call_for_per_sample_grads(model)
    assert "'0.weight'" in str(caught.value)
    for p in model.parameters():
        p.grad_sample = None
    call_for_per_sample_grads(model)(X)


def test_the_function_has_the_signature_of_forward() -> None:
    model = Fn(lambda s, x: x)
    assert inspect.signature(call_for_per_sample_grads(model)) == inspect.signature(model.forward)


def pair() -> Fn:
    return Fn(lambda s, a, b: s.layer(a) + s.layer(b), layer=nn.Linear(5, 3).double())


def test_the_batch_size_is_what_all_tensors_agree_on() -> None:
    with pytest.raises(RuntimeError, match="one input with batch size 4 and one with batch size 2"):
        call_for_per_sample_grads(pair())(X, X[:2])
    with pytest.raises(RuntimeError, match="cannot compute the batch size from the inputs"):
        call_for_per_sample_grads(pair())("no", 3)
    for args, kwargs in [((X, X), {}), ((X,), {"b": X}), ((), {"a": X, "b": X})]:
        model = pair()
        call_for_per_sample_grads(model)(*args, **kwargs).sum().backward()
        assert model.layer.weight.grad_sample.shape == (4, 3, 5)


def test_nested_arguments_tell_the_batch_size() -> None:
    model = Fn(lambda s, batch: s.layer(batch["x"][0]), layer=nn.Linear(5, 3).double())
    call_for_per_sample_grads(model)({"x": [X, X]}).sum().backward()
    assert model.layer.weight.grad_sample.shape == (4, 3, 5)
    model.layer.weight.grad_sample = model.layer.bias.grad_sample = None
    with pytest.raises(RuntimeError, match="batch size 4 and one with batch size 3"):
        call_for_per_sample_grads(model)({"x": [X, X[:3]]})


@dataclasses.dataclass
class Two:
    a: Tensor
    b: Tensor


def test_plain_tensors_tell_the_batch_size_before_dataclasses() -> None:
    def build() -> Fn:
        return Fn(lambda s, two, _: s.layer(two.a) + s.layer(two.b), layer=nn.Linear(5, 3).double())

    with pytest.raises(RuntimeError, match="cannot compute the batch size from the inputs"):
        call_for_per_sample_grads(build())(Two(X, X[:3]), "")
    with pytest.raises(RuntimeError, match="to have batch size matching input"):
        call_for_per_sample_grads(build())(Two(X, X), torch.randn(5))
    for options, other in [({}, torch.randn(4, 5)), ({"batch_size": 4}, torch.randn(5))]:
        model, x = build(), X.clone().requires_grad_()
        call_for_per_sample_grads(model, **options)(Two(x, X), other).sum().backward()
        assert torch.allclose(model.layer.weight.grad_sample[1, 0], 2 * X[1])
        assert torch.allclose(x.grad, model.layer.weight.sum(0).expand(4, 5))


def test_objects_with_tensors_are_opened_for_samples() -> None:
    class Batch:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    for batch, size in itertools.product((Batch(X), Two(X, X), [Two(X, X)]), (None, 4)):
        body = lambda s, b: s.layer(b[0].a if isinstance(b, list) else getattr(b, "x", X))
        model = Fn(body, layer=nn.Linear(5, 3).double())
        call_for_per_sample_grads(model, batch_size=size)(batch).sum().backward()
        assert torch.allclose(model.layer.weight.grad_sample[:, 0], X)


def test_a_ragged_list_is_pointed_out() -> None:
    body = lambda s, parts: torch.stack([s.layer(part).sum() for part in parts])
    model, parts = Fn(body, layer=nn.Linear(5, 3).double()), [X, X[:2].clone(), X[:3].clone()]
    with pytest.raises(RuntimeError, match="batch_size=3, if each tensor of a list is a sample"):
        call_for_per_sample_grads(model)(parts)
    call_for_per_sample_grads(model, batch_size=3)(parts).sum().backward()
    expected = torch.stack([part.sum(0) for part in parts])
    assert torch.allclose(model.layer.weight.grad_sample[:, 0], expected)


# ---------------------------------------------------------------- grad_sample


def test_results_are_fresh_contiguous_and_alone() -> None:
    model = Fn(lambda s, x: s.a(x) + s.b(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3)).double()
    out = call_for_per_sample_grads(model)(X)
    out.sum().backward()
    rows = found(model)
    assert all(g.is_contiguous() and not g.requires_grad for g in rows.values())
    before = {name: g.clone() for name, g in rows.items()}
    for name, g in rows.items():
        g.mul_(3)  # an expanded result could not be written to
        others = [k for k in rows if k != name]
        assert all(torch.equal(rows[k], before[k]) for k in others)
        g.copy_(before[name])


def test_a_second_backward_accumulates() -> None:
    model = net()
    total = loss(call_for_per_sample_grads(model), X).sum()
    total.backward(retain_graph=True)
    first = found(model)
    kept = {name: g.clone() for name, g in first.items()}
    total.backward()
    assert all(torch.allclose(g, 2 * kept[name]) for name, g in found(model).items())
    assert all(torch.equal(g, kept[name]) for name, g in first.items())
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


def test_repeated_use_and_tied_weights_accumulate() -> None:
    torch.manual_seed(0)
    model = Fn(lambda s, x: s.a(s.b(s.a(x)).tanh()), a=nn.Linear(5, 5), b=nn.Linear(5, 5)).double()
    model.b.weight = model.a.weight
    loss(call_for_per_sample_grads(model), X).sum().backward()
    assert relative_error(found(model), oracle(model, loss, X)) < 1e-12


def test_unused_and_frozen_parameters_get_no_attribute() -> None:
    model = Fn(
        lambda s, x: s.used(x), used=nn.Linear(5, 3).double(), unused=nn.Linear(5, 3).double()
    )
    model.used.bias.requires_grad_(False)
    call_for_per_sample_grads(model)(X).sum().backward()
    assert hasattr(model.used.weight, "grad_sample")
    for p in (model.used.bias, model.unused.weight, model.unused.bias):
        assert not hasattr(p, "grad_sample")


def test_a_frozen_module_and_no_grad_are_plain_calls() -> None:
    model = net()
    with torch.no_grad():
        assert torch.equal(call_for_per_sample_grads(model)(X), model(X))
    model.requires_grad_(False)
    x = X.clone().requires_grad_()
    call_for_per_sample_grads(model)(x).sum().backward()
    assert x.grad is not None


def test_parameters_that_came_after_building() -> None:
    model = net().requires_grad_(False)
    call = call_for_per_sample_grads(model)
    model[2] = nn.Linear(6, 3).double()
    loss(call, X).sum().backward()
    assert relative_error(found(model), oracle(model, loss, X)) < 1e-12


def test_inputs_get_ordinary_gradients_also_through_a_history() -> None:
    model, w = net(), torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    call = call_for_per_sample_grads(model, loss_reduction="mean")
    call(X @ w).square().mean().backward()
    (expected,) = torch.autograd.grad(model(X @ w).square().mean(), w)
    assert torch.allclose(w.grad, expected)


def test_gradients_of_inputs_alone_leave_parameters_alone() -> None:
    model, x = net(), X.clone().requires_grad_()
    total = loss(call_for_per_sample_grads(model), x).sum()
    (g,) = torch.autograd.grad(total, x, retain_graph=True)
    total.backward(inputs=[x], retain_graph=True)
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    total.backward()
    assert torch.allclose(x.grad, 2 * g)
    assert relative_error(found(model), oracle(model, loss, X)) < 1e-12


def test_a_regulariser_beside_the_loss_is_ordinary() -> None:
    model = net()
    total = loss(call_for_per_sample_grads(model), X).sum() + model[0].weight.square().sum()
    total.backward()
    assert torch.allclose(model[0].weight.grad, 2 * model[0].weight)
    assert model[2].weight.grad is None
    assert relative_error(found(model), oracle(model, loss, X)) < 1e-12


def test_outputs_keep_their_containers() -> None:
    model = Fn(
        lambda s, x: {"a": s.l(x), "both": (Two(s.l(x), x), [1])}, l=nn.Linear(5, 3).double()
    )
    out = call_for_per_sample_grads(model)(X)
    assert out["both"][0].b is X
    assert out["both"][1] == [1]
    (out["a"].sum() + 2 * out["both"][0].a.sum()).backward()
    assert torch.allclose(model.l.weight.grad_sample[:, 0], 3 * X)


def test_outputs_may_be_changed_in_place() -> None:
    model = net()
    out = call_for_per_sample_grads(model)(X)
    out.mul_(2)
    out.square().sum().backward()
    expected = oracle(model, lambda m, x: (2 * m(x)).square().sum(1), X)
    assert relative_error(found(model), expected) < 1e-12


def test_checkpointing_around_the_call() -> None:
    for reentrant in (False, True):
        model, x = net(), X.clone().requires_grad_()
        call = call_for_per_sample_grads(model)
        out = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=reentrant)
        out.square().sum().backward()
        assert relative_error(found(model), oracle(model, loss, X)) < 1e-12


# ---------------------------------------------------------------- nothing half done


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_module_is_restored_after_an_exception(where: str) -> None:
    model = net()
    before = snapshot(model)

    def fail(*_: Any) -> None:
        raise KeyError(where)

    call = call_for_per_sample_grads(model)
    with pytest.raises(KeyError):
        if where == "forward":
            with model[1].register_forward_hook(fail):
                call(X)
        with model[0].register_forward_hook(lambda m, a, out: out.register_hook(fail) and None):
            out = call(X)
        out.sum().backward()
    for p in model.parameters():
        p.__dict__.pop("grad_sample", None)
    assert snapshot(model) == before
    loss(call, X).sum().backward()
    assert relative_error(found(model), oracle(model, loss, X)) < 1e-12


def test_a_tensor_from_inside_the_module_is_refused_in_the_loss() -> None:
    model, kept = net(), []
    model[1].register_forward_hook(lambda m, a, out: kept.append(out))
    out = call_for_per_sample_grads(model)(X)
    with pytest.raises(persample.UsageError, match="past its outputs"):
        kept[0].sum().backward()
    out = call_for_per_sample_grads(model)(X)
    with pytest.raises(RuntimeError, match="a second time"):  # torch's: the call's graph is freed
        (out.sum() + kept[1].sum()).backward()


def test_a_parameter_changed_before_backward_is_refused() -> None:
    model = net()
    total = call_for_per_sample_grads(model)(X).sum()
    with torch.no_grad():
        model[2].bias.add_(1)
    with pytest.raises(persample.StaleError, match=r"'2.bias' was modified"):
        total.backward()


def test_parameters_alone_are_refused() -> None:
    model = Fn(lambda s, x: (s.l(x), s.l.weight.norm()), l=nn.Linear(5, 3).double())
    out, size = call_for_per_sample_grads(model)(X)
    with pytest.raises(persample.MixedSamplesError, match="depends on parameters alone"):
        (out.sum() + size).backward()


def test_gradient_hooks_on_parameters_are_refused() -> None:
    model = net()
    model[0].weight.register_hook(lambda g: g * 2)
    out = call_for_per_sample_grads(model)(X)
    with pytest.raises(persample.UsageError, match="has a gradient hook"):
        out.sum().backward()


def test_hundreds_of_steps_do_not_grow() -> None:
    model = net()
    call = call_for_per_sample_grads(model)

    def step() -> None:
        loss(call, X).sum().backward()
        for p in model.parameters():
            p.grad_sample = None

    for _ in range(10):
        step()
    gc.collect()
    before = tensors()
    for _ in range(200):
        step()
    gc.collect()
    assert tensors() <= before + 2


def test_factors_die_with_the_graph() -> None:
    model = net()
    gc.collect()
    gc.disable()  # by reference counts alone
    try:
        before = tensors()
        total = loss(call_for_per_sample_grads(model), X).sum()
        assert tensors() > before + 4
        del total
        assert tensors() <= before + 2  # anchors
    finally:
        gc.enable()
