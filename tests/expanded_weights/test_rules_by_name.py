"""Rules by the original's names: applied, subclassed, replaced; contexts of a time loop."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import _expanded_weights as original

import persample
from persample import expanded_weights as ew
from persample.expanded_weights import ExpandedWeight, call_for_per_sample_grads
from persample.expanded_weights.conv_utils import conv_backward
from persample.expanded_weights.expanded_weights_impl import (
    HANDLED_FUNCTIONS,
    allow_smaller_batches,
    batch_second,
    expanded_weights_rnn_decomps,
    setup_rnn,
)
from persample.testing import oracle, relative_error

from .test_functions import alone

N = 3
Sizes = dict[str, tuple[int, ...]]
RULES: dict[Any, tuple[str, tuple[int, ...], tuple[Any, ...], Sizes, dict[str, Any]]] = {
    F.linear: ("Linear", (N, N, 5), (), {"weight": (4, 5), "bias": (4,)}, {}),
    F.conv1d: ("Conv", (N, 4, 7), (), {"weight": (6, 2, 3), "bias": (6,)}, {"groups": 2}),
    F.conv2d: ("Conv", (N, 2, 5, 6), (), {"weight": (4, 2, 3, 1)}, {"padding": "same"}),
    F.conv3d: ("Conv", (N, 2, 4, 5, 4), (), {"weight": (4, 2, 2, 2, 2)}, {"dilation": [2]}),
    F.layer_norm: ("LayerNorm", (N, N, 5), ((5,),), {"weight": (5,), "bias": (5,)}, {"eps": 1e-3}),
    F.group_norm: ("GroupNorm", (N, 4, 5), (2,), {"weight": (4,), "bias": (4,)}, {}),
    F.instance_norm: ("InstanceNorm", (N, N, 5), (), {"weight": (N,), "bias": (N,)}, {}),
    F.embedding: ("Embedding", (N, 4), (), {"weight": (6, 3)}, {"padding_idx": 1}),
}  # fmt: skip


def rule(function: Any) -> Any:
    return getattr(ew, f"{RULES[function][0]}PerSampleGrad")


def case(function: Any) -> tuple[Tensor, tuple[Any, ...], dict[str, Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    _, size, args, shapes, options = RULES[function]
    x = torch.randn(size, dtype=torch.float64)
    if function is F.embedding:
        x = torch.randint(6, size)
    weights = {
        k: torch.randn(s, dtype=torch.float64, requires_grad=True) for k, s in shapes.items()
    }
    return x, args, weights, options


@pytest.fixture
def table() -> Any:
    before = dict(HANDLED_FUNCTIONS)
    yield
    HANDLED_FUNCTIONS.clear()
    HANDLED_FUNCTIONS.update(before)


def test_the_tables_hold_the_same_functions() -> None:
    theirs = original.ExpandedWeight.handled_functions
    assert ExpandedWeight.handled_functions is HANDLED_FUNCTIONS
    assert {f: r.__name__ for f, r in HANDLED_FUNCTIONS.items()} == {
        f: r.__name__ for f, r in theirs.items()
    }
    assert all(HANDLED_FUNCTIONS[function] is rule(function) for function in RULES)
    recurrent = original.expanded_weights_impl.expanded_weights_rnn_decomps
    assert set(expanded_weights_rnn_decomps) == set(recurrent)


# ---------------------------------------------------------------- applied directly


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("function", RULES, ids=lambda f: f.__name__)
def test_apply(function: Any, reduction: str) -> None:
    x, args, weights, options = case(function)
    if x.is_floating_point():
        x.requires_grad_()
    named = {k: ExpandedWeight(w, N, reduction) for k, w in weights.items()} | options
    out = rule(function).apply(tuple(named), function, x, *args, *named.values())
    assert torch.equal(out, function(x, *args, **weights, **options))
    assert out.grad_fn.name() == f"{rule(function).__name__}Backward"
    getattr(out.square(), reduction)().backward()
    expected = alone(
        lambda i, w: function(x[i : i + 1], *args, **w, **options).square(), weights, reduction
    )
    for name, w in weights.items():
        assert relative_error({"": w.grad_sample}, {"": expected[name]}) < 1e-12
        assert w.grad is None
    if x.requires_grad:
        plain = getattr(function(x, *args, **weights, **options).square(), reduction)()
        assert torch.allclose(x.grad, torch.autograd.grad(plain, x)[0])


@pytest.mark.parametrize("function", RULES, ids=lambda f: f.__name__)
def test_everything_by_name_in_any_order(function: Any) -> None:
    x, args, weights, options = case(function)
    place = "normalized_shape" if function is F.layer_norm else "num_groups"
    places = {place: args[0]} if args else {}
    named = {k: ExpandedWeight(w, N, "sum") for k, w in reversed(weights.items())}
    out = function(**options, **named, **places, input=x)
    out.square().sum().backward()
    expected = alone(
        lambda i, w: function(x[i : i + 1], *args, **w, **options).square(), weights, "sum"
    )
    for name, w in weights.items():
        assert torch.allclose(w.grad_sample, expected[name])


def test_the_input_alone_leaves_weights_alone_and_no_second_derivatives() -> None:
    x, w = torch.randn(N, 5, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    out = F.linear(x, ExpandedWeight(w, N, "sum")).tanh()
    (g,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert torch.allclose(g, torch.autograd.grad(F.linear(x, w).tanh().sum(), x)[0])
    assert not hasattr(w, "grad_sample")
    with pytest.raises(persample.MixedSamplesError, match="gradients of gradients"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    out.sum().backward(retain_graph=True)
    first = w.grad_sample.clone()
    out.sum().backward()
    assert torch.allclose(w.grad_sample, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_an_input_changed_in_place_is_noticed() -> None:
    x, w = torch.randn(N, 5), torch.randn(2, 5, requires_grad=True)
    out = F.linear(x, ExpandedWeight(w, N, "sum"))
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_without_gradients_a_call_is_plain() -> None:
    x, w = torch.randn(N, 5), torch.randn(2, 5, requires_grad=True)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = F.linear(x, ExpandedWeight(w, N, "sum"))
        assert not out.requires_grad
        assert torch.equal(out, F.linear(x, w))


# ---------------------------------------------------------------- subclassed and replaced


def subclass(base: Any, calls: list[str], backward: Callable[..., Any] | None = None) -> Any:
    class Mine(base):
        @staticmethod
        def forward(ctx: Any, kwarg_names: Any, function: Any, *values: Any) -> Tensor:
            calls.append("forward")
            return base.forward(ctx, kwarg_names, function, *values)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            calls.append("backward")
            return (backward or base.backward)(ctx, *grads)

    return Mine


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(),
        nn.Linear(64, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3),
    ).double()  # fmt: skip


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_subclasses_inside_a_model(table: Any, reduction: str) -> None:
    calls: list[str] = []
    for function in (F.linear, F.group_norm, F.layer_norm):
        ew.implements_per_sample_grads(function)(subclass(rule(function), calls))
    by_hand = subclass(ew.ConvPerSampleGrad, calls, lambda ctx, g: conv_backward(F.conv2d, ctx, g))
    ew.implements_per_sample_grads(F.conv2d)(by_hand)
    model, x = net(), torch.randn(N, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    losses = loss(call_for_per_sample_grads(model, loss_reduction=reduction), x)
    getattr(losses, reduction)().backward()
    assert sorted(calls) == ["backward"] * 5 + ["forward"] * 5
    found = {name: p.grad_sample for name, p in model.named_parameters()}
    assert relative_error(found, oracle(model, loss, x.detach())) < 1e-12
    plain = getattr(loss(model, x), reduction)()
    assert torch.allclose(x.grad, torch.autograd.grad(plain, x)[0])
    assert all(p.grad is None for p in model.parameters())


def test_a_subclass_on_weights_passed_by_hand(table: Any) -> None:
    calls: list[str] = []
    ew.implements_per_sample_grads(F.linear)(subclass(ew.LinearPerSampleGrad, calls))
    x, w = torch.randn(N, 5), torch.randn(2, 5, requires_grad=True)
    F.linear(x, ExpandedWeight(w, N, "sum")).sum().backward()
    assert calls == ["forward", "backward"]
    assert torch.allclose(w.grad_sample, x.unsqueeze(1).expand(N, 2, 5))


def test_a_rule_for_a_recurrent_function(table: Any) -> None:
    calls: list[Any] = []

    class Mine:
        @staticmethod
        def apply(kwarg_names: Any, function: Any, *values: Any) -> Any:
            calls.append(function)
            return expanded_weights_rnn_decomps[function][0](*values)

    layer = nn.GRU(5, 4)
    made = {k: ExpandedWeight(w, N, "sum") for k, w in layer.named_parameters()}
    ew.implements_per_sample_grads(torch.gru)(Mine)
    functional_call(layer, made, (torch.randn(2, N, 5),))[0].sum().backward()
    assert calls == [torch.gru]
    assert layer.weight_ih_l0.grad_sample.shape == (N, 12, 5)


# ---------------------------------------------------------------- contexts of a time loop


def pair() -> list[ExpandedWeight]:
    torch.manual_seed(0)
    shapes = ((2, 5), (2,))
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    return [ExpandedWeight(leaf, N, "sum") for leaf in leaves]


def test_contexts_set_and_restore() -> None:
    one, two = pair()
    two.set_batch_first(False)
    two.set_allow_smaller_batches(True)
    args, kwargs = (torch.ones(2), [one]), {"more": {"deep": two}}
    for context, name, value in (
        (batch_second, "batch_first", False),
        (allow_smaller_batches, "allow_smaller_batches", True),
        (lambda *a: setup_rnn(True, *a), "batch_first", False),
        (lambda *a: setup_rnn(False, *a), "allow_smaller_batches", True),
    ):
        before = [getattr(w, name) for w in (one, two)]
        with pytest.raises(KeyError), context(args, kwargs):
            assert [getattr(w, name) for w in (one, two)] == [value, value]
            raise KeyError
        assert [getattr(w, name) for w in (one, two)] == before


def test_a_time_loop_of_ones_own() -> None:
    """Of time-first data in one call, and step by step over fewer and fewer samples."""
    lengths = (4, 2, 1)
    sequences = [torch.randn(t, 5, dtype=torch.float64) for t in lengths]
    padded = nn.utils.rnn.pad_sequence(sequences)
    mask = torch.arange(4)[:, None, None] < torch.tensor(lengths)[None, :, None]
    expected = None
    for way in ("second", "smaller"):
        w, b = weights = pair()
        if way == "second":
            with setup_rnn(True, (w, b), {}):
                (F.linear(padded, w, b) * mask).square().sum().backward()
        else:
            packed = nn.utils.rnn.pack_sequence(sequences)
            with setup_rnn(False, (w,), {"bias": b}):
                steps = packed.data.split(packed.batch_sizes.tolist())
                sum(F.linear(x, w, b).square().sum() for x in steps).backward()
        rows = {str(k): e.orig_weight.grad_sample for k, e in enumerate(weights)}
        leaves = [e.orig_weight for e in weights]
        each = [torch.autograd.grad(F.linear(s, *leaves).square().sum(), leaves) for s in sequences]
        expected = {str(k): torch.stack(g) for k, g in enumerate(zip(*each, strict=True))}
        assert relative_error(rows, expected) < 1e-12


# ---------------------------------------------------------------- small things


@pytest.mark.parametrize("size", [N, np.int64(N), np.uint8(N)])
def test_integers_are_batch_sizes(size: Any) -> None:
    layer = nn.Linear(5, 2)
    call_for_per_sample_grads(layer, batch_size=size)(torch.randn(N, 5)).sum().backward()
    assert layer.weight.grad_sample.shape == (N, 2, 5)


@pytest.mark.parametrize("size", [True, np.bool_(True), 3.0, np.float64(3), "3"])
def test_what_is_no_batch_size(size: Any) -> None:
    with pytest.raises(persample.UsageError, match="Batch size passed must be None or an integer"):
        call_for_per_sample_grads(nn.Linear(5, 2), batch_size=size)


def several(s: Any, x: Tensor, mask: Any = None, *more: Any, **rest: Any) -> Tensor:
    return s.layer(x)


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((torch.ones(2, 5),), {}, "mask"),
        ((), {"mask": {"a": [torch.ones(N), torch.ones(2)]}}, "mask['a'][1]"),
        ((None, torch.ones(N), torch.ones(2)), {}, "more[1]"),
        ((), {"ids": torch.ones(2, 1)}, "rest['ids']"),
    ],
)
def test_inputs_of_other_sizes_are_named(args: Any, kwargs: Any, name: str) -> None:
    class Several(nn.Module):
        forward = several

    model = Several()
    model.layer = nn.Linear(5, 2)
    with pytest.raises(persample.UsageError, match="batch size 3 and one with batch size 2") as e:
        call_for_per_sample_grads(model)(torch.randn(N, 5), *args, **kwargs)
    assert str(e.value).splitlines()[0].endswith(f": x and {name}")
    assert f"batch_size={N}" in e.value.fix
    assert name in e.value.fix
    call_for_per_sample_grads(model, batch_size=N)(torch.randn(N, 5), *args, **kwargs)


def test_saving_takes_rows_along_unless_they_are_cleared() -> None:
    model = nn.Linear(50, 40)
    call_for_per_sample_grads(model)(torch.randn(64, 50)).sum().backward()

    def size(value: Any) -> int:
        file = io.BytesIO()
        torch.save(value, file)
        return file.tell()

    full, values = size(model), size(model.state_dict())
    assert not hasattr(copy.deepcopy(model).weight, "grad_sample")
    for p in model.parameters():
        p.grad_sample = None
    assert size(model) < full / 20
    assert values < full / 20
