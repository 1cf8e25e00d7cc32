"""The convolution helpers against torch's autograd, and beside the original's."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils._expanded_weights import conv_utils as original

from persample.expanded_weights import ExpandedWeight, conv_utils

# torch's own, about the copy that it makes where the odd zero goes to one side
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

N, CHANNELS = 3, 4
CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
KERNELS = {1: [(3,), (2,)], 2: [(3, 2), (1, 1)], 3: [(2, 1, 3)]}
SIZES = {1: (8,), 2: (7, 6), 3: (5, 6, 5)}
LAYOUTS = ["contiguous", "transposed", "channels_last"]


def grid() -> Iterator[tuple[Any, ...]]:
    """Axes, kernel, stride, padding, dilation, groups, layout."""
    layouts = itertools.cycle(LAYOUTS)
    for axes, function in CONVOLUTIONS.items():
        uneven = tuple(range(1, axes + 1))
        for kernel, padding, dilation, groups, stride in itertools.product(
            KERNELS[axes],
            [0, 1, uneven, "same", "valid"],
            [1, 2, uneven],
            [1, 2, 4],
            [1, 2, uneven],
        ):
            if padding == "same" and stride not in (1, (1,)):
                continue  # torch refuses it
            reach = [d * (k - 1) for d, k in zip(_each(dilation, axes), kernel, strict=True)]
            if any(r >= s for r, s in zip(reach, SIZES[axes], strict=True)):
                continue
            yield function, kernel, stride, padding, dilation, groups, next(layouts)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)


GRID = list(grid())


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers, elsewhere in memory."""
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels_last":
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    return tensor


def data(function: Any, kernel: tuple[int, ...], options: Any, layout: str) -> list[Tensor]:
    """Input, weight, bias and output gradient."""
    x = torch.randn(N, CHANNELS, *SIZES[len(kernel)], dtype=torch.float64)
    weight = torch.randn(8, CHANNELS // options[-1], *kernel, dtype=torch.float64)
    bias = torch.randn(8, dtype=torch.float64)
    grad = torch.randn_like(function(x, weight, bias, *options))
    return [in_layout(x, layout), weight, bias, in_layout(grad, layout)]


def by_autograd(
    function: Any, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, options: Any
) -> list[Tensor]:
    """Gradients of input, weight and bias, one sample at a time."""
    found = []
    for i in range(len(x)):
        leaves = [t.detach().clone().requires_grad_() for t in (x[i : i + 1], weight, bias)]
        out = function(*leaves, *options)
        found.append(torch.autograd.grad(out, leaves, grad[i : i + 1]))
    inputs, weights, biases = zip(*found, strict=True)
    return [torch.cat(inputs), torch.stack(weights), torch.stack(biases)]


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def context(x: Tensor, weight: Any, bias: Any, options: Any, function: Any) -> Any:
    """What the original's forward keeps for ``conv_backward``."""
    stride, padding, dilation, groups = options
    shape = x.shape
    same = padding == "same"
    if isinstance(padding, str):
        kernel = weight.shape[2:]
        x = conv_utils.conv_input_for_string_padding(function, padding, x, dilation, kernel)
        padding = 0
    return types.SimpleNamespace(
        input=x, orig_input_shape=shape, input_required_grad=True, batch_size=len(x),
        weight=weight, bias=bias, stride=stride, padding=padding, dilation=dilation, groups=groups,
        was_same_padding=same,
    )  # fmt: skip


def test_the_grid_is_large() -> None:
    assert len(GRID) >= 200
    assert {case[-1] for case in GRID} == set(LAYOUTS)


@pytest.mark.parametrize("axes", CONVOLUTIONS)
def test_helpers_against_autograd(axes: int) -> None:
    torch.manual_seed(0)
    for function, kernel, stride, padding, dilation, groups, layout in GRID:
        if len(kernel) != axes:
            continue
        options = (stride, padding, dilation, groups)
        x, weight, bias, grad = data(function, kernel, options, layout)
        expected = by_autograd(function, x, weight, bias, grad, options)
        shape = weight.shape
        unfolded = conv_utils.conv_unfold_weight_grad_sample(
            x, grad, shape, kernel, stride, padding, dilation, groups, function
        )
        grouped = conv_utils.conv_group_weight_grad_sample(
            x, grad, shape, stride, padding, dilation, N, function
        )
        leaves = [t.clone().requires_grad_() for t in (weight, bias)]
        ctx = context(x, *(ExpandedWeight(t, N, "sum") for t in leaves), options, function)
        found = conv_utils.conv_backward(function, ctx, grad)
        assert [g is None for g in found] == [k != 2 for k in range(9)]
        case = (kernel, *options, layout)
        assert error(unfolded, expected[1]) < 1e-10, case
        assert error(grouped, expected[1]) < 1e-10, case
        assert error(found[2], expected[0]) < 1e-10, case
        assert error(leaves[0].grad_sample, expected[1]) < 1e-10, case
        assert error(leaves[1].grad_sample, expected[2]) < 1e-10, case


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_what_conv_backward_leaves_out(reduction: str) -> None:
    x, weight, bias, grad = data(F.conv2d, (3, 2), (1, 0, 1, 2), "contiguous")
    leaf = weight.clone().requires_grad_()
    ctx = context(x, ExpandedWeight(leaf, N, reduction), bias, (1, 0, 1, 2), F.conv2d)
    ctx.input_required_grad = False
    assert conv_utils.conv_backward(F.conv2d, ctx, grad) == (None,) * 9
    expected = by_autograd(F.conv2d, x, weight, bias, grad, (1, 0, 1, 2))[1]
    assert error(leaf.grad_sample, expected * (N if reduction == "mean" else 1)) < 1e-10
    assert not hasattr(bias, "grad_sample")
    ctx.bias = bias.requires_grad_()
    with pytest.raises(RuntimeError, match="does not support a mixture"):
        conv_utils.conv_backward(F.conv2d, ctx, grad)


@pytest.mark.parametrize("padding", [1, "same"])
@pytest.mark.parametrize("groups", [1, 2])
def test_complex_convolutions(groups: int, padding: Any) -> None:
    options, dtype = (1, padding, 2, groups), torch.complex128
    x = torch.randn(N, 4, 7, dtype=dtype)
    weight, bias = torch.randn(6, 4 // groups, 3, dtype=dtype), torch.randn(6, dtype=dtype)
    grad = torch.randn_like(F.conv1d(x, weight, bias, *options))
    expected = by_autograd(F.conv1d, x, weight, bias, grad, options)
    leaves = [t.clone().requires_grad_() for t in (weight, bias)]
    ctx = context(x, *(ExpandedWeight(t, N, "sum") for t in leaves), options, F.conv1d)
    found = conv_utils.conv_backward(F.conv1d, ctx, grad)[2]
    for mine, right in zip((found, *(t.grad_sample for t in leaves)), expected, strict=True):
        assert error(mine, right) < 1e-10


def test_half_precision_keeps_the_weights_dtype() -> None:
    x, weight, bias, grad = data(F.conv2d, (3, 2), (1, 0, 1, 1), "contiguous")
    leaf = weight.float().requires_grad_()
    ctx = context(x.float(), ExpandedWeight(leaf, N, "sum"), None, (1, 0, 1, 1), F.conv2d)
    found = conv_utils.conv_backward(F.conv2d, ctx, grad.bfloat16())[2]
    expected = by_autograd(F.conv2d, x, weight, bias, grad, (1, 0, 1, 1))
    assert found.dtype == leaf.grad_sample.dtype == torch.float32
    assert error(leaf.grad_sample, expected[1]) < 0.02
    assert error(found, expected[0]) < 0.02


@pytest.mark.parametrize("dilation", [1, (1, 2, 1), [2, 1, 2]])
@pytest.mark.parametrize("padding", [0, (1, 0, 2)])
@pytest.mark.parametrize("stride", [1, (2, 1, 3)])
def test_unfold3d_times_a_kernel_is_a_convolution(stride: Any, padding: Any, dilation: Any) -> None:
    x = torch.randn(2, 3, 5, 6, 7, dtype=torch.float64)
    weight = torch.randn(4, 3, 2, 3, 2, dtype=torch.float64)
    columns = conv_utils.unfold3d(x, (2, 3, 2), padding, stride, dilation)
    expected = F.conv3d(x, weight, None, stride, padding, dilation)
    assert error((weight.flatten(1) @ columns).view(expected.shape), expected) < 1e-10


def test_arguments_and_padding_beside_the_original() -> None:
    for function, kernel in ((F.conv1d, (4,)), (F.conv2d, (3, 4)), (F.conv3d, (2, 3, 4))):
        x = torch.randn(2, 2, *[5] * len(kernel))
        for style, dilation in itertools.product(
            ("same", "valid"), (1, 2, (3, 1, 2)[: len(kernel)])
        ):
            pair = [
                (m.int_padding_for_string_padding(function, style, dilation, kernel),
                 m.conv_input_for_string_padding(function, style, x, dilation, kernel))
                for m in (conv_utils, original)
            ]  # fmt: skip
            assert pair[0][0] == pair[1][0]
            assert torch.equal(pair[0][1], pair[1][1])
        options = [m.conv_picker(function, 1, 2, 3) for m in (conv_utils, original)]
        assert options == [len(kernel)] * 2
    for names, values in ((("bias", "groups"), (1, 2, 3, 4)), ((), (1, 2)), ((), range(1, 8))):
        pair = [m.conv_args_and_kwargs(names, tuple(values)) for m in (conv_utils, original)]
        assert pair[0] == pair[1]
    for dilation, kernel_size in itertools.product(range(1, 4), range(1, 6)):
        both = [m.conv_padding_for_same(dilation, kernel_size) for m in (conv_utils, original)]
        assert both[0] == both[1]


def test_the_original_unfolds_volumes_alike() -> None:
    x = torch.randn(2, 3, 4, 5, 6)
    arguments = ((2, 3, 2), (1, 0, 1), (2, 1, 1), (1, 1, 1))
    assert torch.equal(conv_utils.unfold3d(x, *arguments), original.unfold3d(x, *arguments))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: conv_utils.conv_picker(F.linear, 1, 2, 3), "Expected func to be F.conv1d"),
        (
            lambda: conv_utils.int_padding_for_string_padding(F.conv1d, "full", 1, (3,)),
            "only accept 'same' or 'valid'",
        ),
        (lambda: conv_utils.unfold3d(torch.ones(2, 3, 4), 2, 0, 1, 1), "must be of the shape"),
        (
            lambda: conv_utils.conv_group_weight_grad_sample(
                torch.ones(2, 3, 4), torch.ones(2, 5, 4), (5, 3, 1), 1, 0, 1, 3, F.conv1d
            ),
            "2 samples for a batch size of 3",
        ),
    ],
)
def test_what_is_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(RuntimeError, match=text) as caught:
        call()
    assert caught.value.fix
