"""ExpandedWeights handed to functions, against one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_map

from persample.expanded_weights import ExpandedWeight

N = 3
Weights = dict[str, Tensor]
CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "linear": (F.linear, (N, 5), {"weight": (2, 5), "bias": (2,)}),
    "linear without bias": (F.linear, (N, 5), {"weight": (2, 5)}),
    "linear of rank 4": (F.linear, (N, 2, N, 5), {"weight": (2, 5), "bias": (2,)}),
    "conv1d": (F.conv1d, (N, 2, 7), {"weight": (4, 2, 3), "bias": (4,)}),
    "conv2d": (F.conv2d, (N, 2, 5, 6), {"weight": (4, 2, 3, 2), "bias": (4,)}),
    "conv3d": (F.conv3d, (N, 2, 4, 5, 3), {"weight": (4, 2, 3, 2, 2), "bias": (4,)}),
    "conv2d same": (
        lambda x, **w: F.conv2d(x, padding="same", **w), (N, 2, 5, 6), {"weight": (4, 2, 3, 5)},
    ),
    "conv2d valid": (
        lambda x, **w: F.conv2d(x, padding="valid", **w), (N, 2, 5, 6), {"weight": (4, 2, 3, 2)},
    ),
    "conv2d with everything": (
        lambda x, **w: F.conv2d(x, stride=[2], padding=(1, 2), dilation=2, groups=2, **w),
        (N, 4, 7, 8), {"bias": (6,), "weight": (6, 2, 2, 3)},
    ),
    "conv2d by name": (
        lambda x, weight, bias: F.conv2d(bias=bias, groups=1, weight=weight, input=x),
        (N, 2, 5, 6), {"weight": (4, 2, 3, 2), "bias": (4,)},
    ),
    "layer_norm": (
        lambda x, **w: F.layer_norm(x, (4, 5), **w), (N, 4, 5), {"weight": (4, 5), "bias": (4, 5)},
    ),
    "layer_norm positional": (
        lambda x, weight, bias: F.layer_norm(x, [5], weight, bias, 1e-3),
        (N, N, 5), {"weight": (5,), "bias": (5,)},
    ),
    "group_norm": (
        lambda x, **w: F.group_norm(x, 2, **w), (N, 4, 5), {"weight": (4,), "bias": (4,)},
    ),
    "group_norm weight": (lambda x, **w: F.group_norm(x, 2, **w), (N, 4, 5), {"weight": (4,)}),
    "instance_norm": (F.instance_norm, (N, 3, 5), {"weight": (3,), "bias": (3,)}),
    "instance_norm running": (
        lambda x, **w: F.instance_norm(
            x, torch.arange(N, dtype=x.dtype), torch.ones(N, dtype=x.dtype) * 2,
            use_input_stats=False, **w,
        ),
        (N, N, 5), {"weight": (3,), "bias": (3,)},
    ),
}  # fmt: skip


def alone(run: Callable[[int, Weights], Tensor], weights: Weights, reduction: str) -> Weights:
    """Gradients of one sample at a time."""
    each = [
        torch.autograd.grad(getattr(run(i, weights), reduction)(), list(weights.values()))
        for i in range(N)
    ]
    return {k: torch.stack(g) for k, g in zip(weights, zip(*each, strict=True), strict=True)}


def expanded(weights: Weights, reduction: str, n: int = N) -> Weights:
    return {name: ExpandedWeight(w, n, reduction) for name, w in weights.items()}


def check(weights: Weights, expected: Weights) -> None:
    for name, w in weights.items():
        assert torch.allclose(w.grad_sample, expected[name], atol=1e-12), name
        assert w.grad is None
        assert w.grad_sample.is_contiguous()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_functions(name: str, input_grad: bool, reduction: str) -> None:
    function, size, shapes = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(size, dtype=torch.float64, requires_grad=input_grad)
    weights = {
        k: torch.randn(s, dtype=torch.float64, requires_grad=True) for k, s in shapes.items()
    }
    expected = alone(lambda i, w: function(x[i : i + 1], **w).square(), weights, reduction)
    out = function(x, **expanded(weights, reduction))
    assert torch.equal(out, function(x, **weights))
    getattr(out.square(), reduction)().backward()
    check(weights, expected)
    if input_grad:
        found, x.grad = x.grad, None
        getattr(function(x, **weights).square(), reduction)().backward()
        assert torch.allclose(found, x.grad)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", CASES)
def test_the_output_reduced_at_once(name: str, reduction: str) -> None:
    """The gradient that arrives is then one number, expanded."""
    function, size, shapes = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(size, dtype=torch.float64)
    weights = {
        k: torch.randn(s, dtype=torch.float64, requires_grad=True) for k, s in shapes.items()
    }
    expected = alone(lambda i, w: function(x[i : i + 1], **w), weights, reduction)
    getattr(function(x, **expanded(weights, reduction)), reduction)().backward()
    check(weights, expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"padding_idx": 1}, {"padding_idx": -1}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}],
)
def test_embedding(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    index = torch.tensor([[1, 1, 5], [5, 5, 5], [0, 2, 1]])
    w = torch.randn(6, 4, dtype=torch.float64)
    weights = {"weight": w.clone().requires_grad_()}
    plain = {"weight": w.clone().requires_grad_()}
    out = F.embedding(index, **expanded(weights, "sum"), **options)
    expected = alone(lambda i, v: F.embedding(index[i], **v, **options).square(), plain, "sum")
    out.square().sum().backward()
    check(weights, expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda w: F.linear(torch.randn(5), w(2, 5)),
        lambda w: F.conv1d(torch.randn(2, 7), w(4, 2, 3)),
        lambda w: F.conv2d(torch.randn(2, 7, 7), w(4, 2, 3, 3)),
        lambda w: F.layer_norm(torch.randn(N, 5), (N, 5), w(N, 5)),
        lambda w: F.embedding(torch.tensor(2), w(4, 5)),
        lambda w: F.embedding(torch.tensor([2, 1]), w(4, 5)),
        lambda w: F.linear(torch.randn(0, 5), w(2, 5)),
    ],
)
def test_data_without_samples_are_refused(call: Callable[..., Tensor]) -> None:
    with pytest.raises(RuntimeError, match="Expanded Weights"):
        call(lambda *s: ExpandedWeight(torch.randn(s, requires_grad=True), N, "sum"))


def test_a_trainable_tensor_beside_expanded_ones_is_refused() -> None:
    w = ExpandedWeight(torch.randn(2, 5, requires_grad=True), N, "sum")
    with pytest.raises(RuntimeError, match="does not support a mixture of ExpandedWeight param"):
        F.linear(torch.randn(N, 5), w, torch.randn(2, requires_grad=True))
    frozen = torch.randn(2)
    F.linear(torch.randn(N, 5), w, frozen).sum().backward()
    assert w.orig_weight.grad_sample.shape == (N, 2, 5)


def test_samples_on_axis_one_and_smaller_batches() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, N, 5, dtype=torch.float64)
    weights = {"weight": torch.randn(2, 5, dtype=torch.float64, requires_grad=True)}
    expected = alone(lambda i, w: F.linear(x[:, i], **w).square(), weights, "sum")
    made = expanded(weights, "sum")
    made["weight"].set_batch_first(False)
    F.linear(x, **made).square().sum().backward()
    check(weights, expected)
    w = weights["weight"].detach().clone().requires_grad_()
    larger = ExpandedWeight(w, N + 2, "sum")
    with pytest.raises(RuntimeError, match="to have batch size matching input"):
        F.linear(x.transpose(0, 1), larger)
    larger.set_allow_smaller_batches(True)
    F.linear(x.transpose(0, 1), larger).square().sum().backward()
    assert torch.allclose(w.grad_sample[:N], expected["weight"])
    assert w.grad_sample.shape == (N + 2, 2, 5)
    assert not w.grad_sample[N:].any()


@pytest.mark.parametrize(
    ("other", "text"),
    [(("mean", N), "the same loss_reduction argument"), (("sum", N + 1), "the same batch_size")],
)
def test_weights_of_one_call_must_be_alike(other: tuple[str, int], text: str) -> None:
    w = ExpandedWeight(torch.randn(2, 5, requires_grad=True), N, "sum")
    b = ExpandedWeight(torch.randn(2, requires_grad=True), other[1], other[0])
    b.set_allow_smaller_batches(True)
    with pytest.raises(RuntimeError, match=f"Expected ExpandedWeights to all have {text}"):
        F.linear(torch.randn(N, 5), w, b)
    net = nn.GRU(5, 2, bias=False)
    names = ("weight_ih_l0", "weight_hh_l0")
    made = {k: ExpandedWeight(getattr(net, k), N, "sum") for k in names}
    made["weight_hh_l0"] = ExpandedWeight(net.weight_hh_l0, other[1], other[0])
    made["weight_hh_l0"].set_allow_smaller_batches(True)
    with pytest.raises(RuntimeError, match=f"Expected ExpandedWeights to all have {text}"):
        functional_call(net, made, (torch.randn(4, N, 5),))


def test_several_calls_add_up_and_weights_may_have_a_history() -> None:
    x = torch.randn(N, 5)
    w = torch.randn(2, 5, requires_grad=True).clone()
    for _ in range(2):
        F.linear(x, ExpandedWeight(w, N, "sum")).sum().backward()
    assert torch.allclose(w.grad_sample, 2 * x.unsqueeze(1).expand(N, 2, 5))


RECURRENT: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu", "bias": False}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    (nn.LSTM, {"num_layers": 2}),
    (nn.LSTM, {"bidirectional": True, "bias": False}),
    (nn.LSTM, {"proj_size": 2}),
]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_recurrent_layers(kind: Any, options: dict[str, Any], batch_first: bool) -> None:
    torch.manual_seed(0)
    net = kind(5, 4, batch_first=batch_first, **options).double()
    x = torch.randn(N, N, 5, dtype=torch.float64)
    axis = 0 if batch_first else 1
    weights = dict(net.named_parameters())
    expected = alone(lambda i, _: net(x.narrow(axis, i, 1))[0].square(), weights, "sum")
    out, _ = functional_call(net, expanded(weights, "sum"), (x,))
    out.square().sum().backward()
    check(weights, expected)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("lengths", [(5, 3, 2), (2, 5, 3)])
@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_packed_recurrent_layers(
    kind: Any, options: dict[str, Any], lengths: tuple[int, ...], given: bool
) -> None:
    """Rows are in the caller's order, sorted by length or not, with states of the caller's own."""
    torch.manual_seed(0)
    net = kind(5, 4, **options).double()
    sequences = [torch.randn(t, 5, dtype=torch.float64) for t in lengths]
    first = tree_map(torch.detach, net(torch.randn(1, N, 5).double())[1]) if given else None

    def one(i: int, _: Any) -> Tensor:
        state = tree_map(lambda h: h[:, i : i + 1].contiguous(), first) if given else None
        return net(sequences[i].unsqueeze(1), state)[0].square()

    weights = dict(net.named_parameters())
    expected = alone(one, weights, "sum")
    packed = pack_sequence(sequences, enforce_sorted=False)
    out, _ = functional_call(net, expanded(weights, "sum"), (packed, first))
    out.data.square().sum().backward()
    check(weights, expected)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_on_smaller_batches(kind: Any, packed: bool, reduction: str) -> None:
    torch.manual_seed(0)
    net = kind(5, 4).double()
    lengths = (5, 3, 2) if packed else (4, 4, 4)
    sequences = [torch.randn(t, 5, dtype=torch.float64) for t in lengths]
    x = pack_sequence(sequences) if packed else torch.stack(sequences, 1)
    weights = dict(net.named_parameters())
    expected = alone(lambda i, _: net(sequences[i].unsqueeze(1))[0].square(), weights, "sum")
    made = expanded(weights, reduction, N + 2)
    for e in made.values():
        e.set_allow_smaller_batches(True)
    out, _ = functional_call(net, made, (x,))
    (out.data if packed else out).square().sum().backward()
    factor = N + 2 if reduction == "mean" else 1
    zeros = {k: g.new_zeros(2, *g.shape[1:]) for k, g in expected.items()}
    check(weights, {k: torch.cat([factor * g, zeros[k]]) for k, g in expected.items()})


def test_recurrent_layers_refuse_other_batches_and_mixtures() -> None:
    net, x = nn.LSTM(5, 4), torch.randn(2, N, 5)
    weights = dict(net.named_parameters())
    with pytest.raises(RuntimeError, match="to have batch size matching input"):
        functional_call(net, expanded(weights, "sum", N + 1), (x,))
    some = {"weight_ih_l0": ExpandedWeight(net.weight_ih_l0, N, "sum")}
    with pytest.raises(RuntimeError, match="does not support a mixture"):
        functional_call(net, some, (x,))
