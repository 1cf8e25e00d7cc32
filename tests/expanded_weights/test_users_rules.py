"""ExpandedWeight itself, the functions that users' rules call, and rules of one's own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import expanded_weights as ew
from persample.expanded_weights import ExpandedWeight, call_for_per_sample_grads
from persample.testing import oracle, relative_error

from ..models import Fn, par
from .test_contract import X, found, loss, net

# ---------------------------------------------------------------- ExpandedWeight and the helpers


def weight(n: int = 4, *shape: int, reduction: str = "sum") -> ExpandedWeight:
    return ExpandedWeight(torch.randn(shape or (3, 5)).double().requires_grad_(), n, reduction)


def test_an_expanded_weight_answers_for_the_original() -> None:
    made = weight()
    w = made.orig_weight
    assert (made.batch_size, made.loss_reduction) == (4, "sum")
    assert (made.batch_first, made.allow_smaller_batches) == (True, False)
    assert (made.shape, made.dtype, made.device) == (w.shape, w.dtype, w.device)
    assert (made.is_cuda, made.get_device()) == (False, -1)
    assert made.data_ptr() == w.data_ptr() == made.data.data_ptr()
    assert (made.size(0), made.dim(), made.numel(), made.requires_grad) == (3, 2, 15, True)
    assert repr(made).startswith("ExpandedWeight(tensor(")


def test_what_cannot_be_expanded() -> None:
    with pytest.raises(RuntimeError, match="Can only make Expanded Weights of Tensors"):
        ExpandedWeight(3, 4, "sum")
    with pytest.raises(RuntimeError, match="objects of tensors that require"):
        ExpandedWeight(torch.randn(3), 4, "sum")


def test_a_function_without_a_rule_is_refused() -> None:
    with pytest.raises(RuntimeError, match="encountered but cannot handle function add") as caught:
        torch.add(X, weight(4, 5))
    assert caught.value.where
    assert caught.value.why
    assert caught.value.fix


def test_what_would_change_or_copy_the_original_is_refused() -> None:
    def set_grad(e: ExpandedWeight) -> None:
        e.grad = torch.zeros(3, 5)

    for call in (copy.deepcopy, copy.copy, pickle.dumps, set_grad, lambda e: e.requires_grad_()):
        made = weight()
        with pytest.raises(RuntimeError, match="encountered but cannot handle function"):
            call(made)
        assert made.orig_weight.grad is None


def test_standard_kwargs_and_forward_helper() -> None:
    w, b = weight(), weight(4, 3)
    args, kwargs = ew.standard_kwargs(("bias",), (X, w, b))
    assert args[0] is X
    assert args[1] is w
    assert list(kwargs) == ["bias"]
    assert kwargs["bias"] is b
    expected = F.linear(X, w.orig_weight, b.orig_weight)
    assert torch.equal(ew.forward_helper(F.linear, args, kwargs), expected)
    with pytest.raises(RuntimeError, match="to all have the same loss_reduction argument"):
        ew.forward_helper(F.linear, args, {"bias": weight(4, 3, reduction="mean")})


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (weight(4, 4, 5), "do not support inputs that are also ExpandedWeights"),
        (3, "requires a Tensor as the first input"),
        (torch.tensor(3.0), "requires a batch dimension but got an input of size 0"),
        (torch.randn(0, 5), "0 is not a valid batch size for Expanded Weights"),
        (torch.randn(3, 5), "Expected ExpandedWeights to have batch size matching input"),
    ],
)
def test_what_the_first_argument_must_be(data: Any, text: str) -> None:
    for call in (
        lambda: ew.forward_helper(F.linear, (data, weight()), {}),
        lambda: F.linear(data, weight()) if isinstance(data, Tensor) else call_directly(data),
    ):
        with pytest.raises(RuntimeError, match=text) as caught:
            call()
        assert "linear, " in caught.value.where
        assert caught.value.fix


def call_directly(data: Any) -> None:
    ExpandedWeight.handled_functions[F.linear].apply((), F.linear, data, weight())


def test_set_grad_sample_if_exists() -> None:
    rows = torch.randn(4, 3, 5)
    for reduction, factor in (("sum", 1), ("mean", 4)):
        made = weight(reduction=reduction)
        for times in (1, 2):
            ew.set_grad_sample_if_exists(made, lambda w: rows)
            assert torch.allclose(made.orig_weight.grad_sample, times * factor * rows)
    made = weight()
    ew.set_grad_sample_if_exists(made, lambda w: rows[:1, :1].expand(3, 3, 5))
    assert made.orig_weight.grad_sample.is_contiguous()
    assert not made.orig_weight.grad_sample[3].any()  # of a smaller batch
    plain = torch.randn(4)
    for nothing in (plain, 3, None):
        ew.set_grad_sample_if_exists(nothing, lambda w: rows)
    assert not hasattr(plain, "grad_sample")
    with pytest.raises(RuntimeError, match="does not support a mixture of ExpandedWeight param"):
        ew.set_grad_sample_if_exists(plain.requires_grad_(), lambda w: rows)


def test_unpack_expanded_weight_or_tensor() -> None:
    made, plain = weight(), torch.randn(3)
    assert ew.unpack_expanded_weight_or_tensor(made) is made.orig_weight
    assert ew.unpack_expanded_weight_or_tensor(plain) is plain
    assert ew.unpack_expanded_weight_or_tensor(4) is None
    assert ew.unpack_expanded_weight_or_tensor(made, lambda w: w is made.orig_weight)
    with pytest.raises(RuntimeError, match="does not support a mixture"):
        ew.unpack_expanded_weight_or_tensor(plain.requires_grad_())


def test_sums_scales_and_axes() -> None:
    x = torch.randn(1, 2, 3, 4, 5)
    assert torch.equal(ew.sum_over_all_but_batch_and_last_n(x, 2), x.sum((1, 2)))
    assert torch.equal(ew.sum_over_all_but_batch_and_last_n(x, 0), x.sum((1, 2, 3, 4)))
    assert ew.sum_over_all_but_batch_and_last_n(x, 4) is x
    assert torch.equal(ew.maybe_scale_by_batch_size(x, weight(reduction="mean")), 4 * x)
    one, two = weight(), weight()
    assert ew.is_batch_first((X, one, two, 3)) is True
    assert ew.is_batch_first((X, 3)) is None
    two.set_batch_first(False)
    assert ew.is_batch_first((two,)) is False
    with pytest.raises(RuntimeError, match="conflicting batch_first"):
        ew.is_batch_first((one, two))


# ---------------------------------------------------------------- rules of one's own


class Affine(torch.autograd.Function):
    """addcmul(x, w, x) = x + w x, with a weight for every feature."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, kwarg_names: Any, function: Any, *values: Any) -> Tensor:
        args, kwargs = ew.standard_kwargs(kwarg_names, values)
        Affine.calls += 1
        ctx.x, ctx.w = args[0], args[1]
        ctx.count = len(values)
        return ew.forward_helper(function, args, kwargs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        w = ew.unpack_expanded_weight_or_tensor(ctx.w)
        ew.set_grad_sample_if_exists(
            ctx.w, lambda _: ew.sum_over_all_but_batch_and_last_n(grad * ctx.x, 1)
        )
        return None, None, grad * (1 + w), *(None,) * (ctx.count - 1)


@pytest.fixture
def own() -> Any:
    before = dict(ExpandedWeight.handled_functions)
    Affine.calls = 0
    yield
    ExpandedWeight.handled_functions.clear()
    ExpandedWeight.handled_functions.update(before)


def affine() -> Fn:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.before(x)
        return s.after(torch.addcmul(h, s.w, h).tanh())

    torch.manual_seed(0)
    return Fn(forward, w=par(6), before=nn.Linear(5, 6), after=nn.Linear(6, 3)).double()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_rule_of_ones_own(own: Any, reduction: str) -> None:
    assert ew.implements_per_sample_grads(torch.addcmul)(Affine) is Affine
    model = affine()
    expected = oracle(model, loss, X)
    losses = loss(call_for_per_sample_grads(model, loss_reduction=reduction), X)
    getattr(losses, reduction)().backward()
    assert Affine.calls == 1
    assert relative_error(found(model), expected) < 1e-12
    made = weight(4, 5)
    torch.addcmul(X, made, value=2, tensor2=X).sum().backward()
    assert torch.allclose(made.orig_weight.grad_sample, X)
    assert Affine.calls == 2


def test_a_second_registration_replaces_also_a_rule_of_ours(own: Any) -> None:
    calls = []

    @ew.implements_per_sample_grads(F.linear)
    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, names: Any, function: Any, *values: Any) -> Tensor:
            args, kwargs = ew.standard_kwargs(names, values)
            calls.append(function)
            ctx.x, ctx.w = values[0], values[1]
            ctx.b = args[2] if len(args) > 2 else kwargs.get("bias")
            ctx.count = len(values)
            return ew.forward_helper(function, args, kwargs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            ew.set_grad_sample_if_exists(ctx.w, lambda _: torch.einsum("no,ni->noi", grad, ctx.x))
            ew.set_grad_sample_if_exists(ctx.b, lambda _: grad)
            w = ew.unpack_expanded_weight_or_tensor(ctx.w)
            return None, None, grad @ w, *(None,) * (ctx.count - 1)

    model = net()
    loss(call_for_per_sample_grads(model), X).sum().backward()
    assert calls == [F.linear, F.linear]
    assert relative_error(found(model), oracle(model, loss, X)) < 1e-12


def test_a_rule_of_ones_own_needs_samples_on_the_first_axis(own: Any) -> None:
    ew.implements_per_sample_grads(torch.addcmul)(Affine)
    model = Fn(lambda s, x: torch.addcmul(x.t(), s.w, x.t()), w=par(4)).double()
    with pytest.raises(RuntimeError, match="to have batch size matching input"):
        call_for_per_sample_grads(model)(X)


def test_rows_of_a_failed_backward_are_taken_back(own: Any) -> None:
    ew.implements_per_sample_grads(torch.addcmul)(Affine)
    model = affine()

    def fail(*_: Any) -> None:
        raise KeyError

    with model.before.register_forward_hook(lambda m, a, out: out.register_hook(fail) and None):
        out = call_for_per_sample_grads(model)(X)
    with pytest.raises(KeyError):
        out.sum().backward()
    assert all(getattr(p, "grad_sample", None) is None for p in model.parameters())
