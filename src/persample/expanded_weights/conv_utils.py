"""The arguments of convolutions, and their gradients sample by sample.

For rules of one's own: the gradients are autograd's of one convolution in which every sample is a
group. Our own rule asks the recorder instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError
from ..forms import Geometry, wide
from ..forms.convolution import unfold
from .expanded_weights_utils import (
    set_grad_sample_if_exists,
    standard_kwargs,
    unpack_expanded_weight_or_tensor,
)
from .recorded_rule import recorded_backward

Sizes = int | Sequence[int]
Option = TypeVar("Option")
# the batch size from which the original unfolds; here nothing reads it
THRESHOLD = 32


# ---------------------------------------------------------------- arguments


def conv_picker(  # arguments have the original's names, by which they may be passed
    func: Callable[..., Any],
    conv1dOpt: Option,  # noqa: N803
    conv2dOpt: Option,  # noqa: N803
    conv3dOpt: Option,  # noqa: N803
) -> Option:
    """The option for this function.

    >>> conv_picker(F.conv2d, "line", "plane", "space")
    'plane'
    """
    for function, option in ((F.conv1d, conv1dOpt), (F.conv2d, conv2dOpt), (F.conv3d, conv3dOpt)):
        if func is function:
            return option
    raise UsageError(
        f"Expected func to be F.conv1d, F.conv2d, or F.conv3d, got {func}",
        why="Expanded Weights have rules for these three convolutions",
        fix="persample.record follows the others, transposed ones included",
    )


def conv_args_and_kwargs(
    kwarg_names: Sequence[str], expanded_args_and_kwargs: Sequence[Any]
) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """The arguments of ``apply`` in one order: ((input, weight), the others by name).

    >>> conv_args_and_kwargs(("groups", "weight"), ("x", 2, "w"))[1]["groups"]
    2
    """
    args, kwargs = standard_kwargs(kwarg_names, expanded_args_and_kwargs)
    return conv_normalizer(*args, **kwargs)


def conv_normalizer(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Bind as a convolution does: ((input, weight), bias, stride, padding, dilation, groups)."""
    named = {
        "bias": bias,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
    }
    return (input, weight), named


# ---------------------------------------------------------------- padding


def conv_padding_for_same(dilation: int, kernel_size: int) -> tuple[int, int]:
    """Zeros before and after one axis so that its size stays; the odd one goes after.

    >>> conv_padding_for_same(3, 4)
    (4, 5)
    """
    width = dilation * (kernel_size - 1)
    return width // 2, width - width // 2


def int_padding_for_string_padding(
    func: Callable[..., Any], padding_style: Any, dilation: Sizes, kernel_size: Sequence[int]
) -> Sequence[int]:
    """The widths that ``F.pad`` takes, last axis first, for "same" and "valid".

    >>> int_padding_for_string_padding(F.conv2d, "same", (1, 2), (3, 4))
    [3, 3, 1, 1]
    """
    axes = conv_picker(func, 1, 2, 3)
    if padding_style == "valid":
        return (0, 0) * axes
    if padding_style == "same":
        apart = _each_axis(dilation, axes)
        pairs = [conv_padding_for_same(apart[d], kernel_size[d]) for d in reversed(range(axes))]
        return [width for pair in pairs for width in pair]
    raise UsageError(
        f"got padding type of {padding_style}, only accept 'same' or 'valid'",
        fix="pass numbers to the convolution itself, which takes them",
    )


def conv_input_for_string_padding(
    func: Callable[..., Any],
    padding_style: Any,
    input: Tensor,
    dilation: Sizes,
    kernel_size: Sequence[int],
) -> Tensor:
    """The input with its padding written out; itself for "valid"."""
    widths = int_padding_for_string_padding(func, padding_style, dilation, kernel_size)
    return F.pad(input, list(widths)) if any(widths) else input


def _each_axis(value: Sizes, axes: int) -> tuple[int, ...]:
    """One number for each axis."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


# ---------------------------------------------------------------- gradients


def conv_backward(
    func: Callable[..., Any], ctx: Any, grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """The backward pass of ``ConvPerSampleGrad``, or of a rule that keeps the same in its ctx.

    ``ctx`` has input, orig_input_shape, input_required_grad, batch_size, weight, bias, stride,
    padding, dilation, groups and was_same_padding (the input is padded already). ``grad_sample`` of
    weight and bias is set; the gradient of the input is the third of the nine returned.
    """
    if getattr(ctx, "recorded", None) is not None:
        return recorded_backward(ctx, grad_output)
    weight = unpack_expanded_weight_or_tensor(ctx.weight, Tensor.detach)
    found, rows = _gradients(
        func, ctx.input, weight, grad_output, ctx.stride, ctx.padding, ctx.dilation, ctx.groups
    )
    if ctx.was_same_padding:
        widths = int_padding_for_string_padding(func, "same", ctx.dilation, weight.shape[2:])
        for axis, width in enumerate(reversed(widths[::2]), start=2):
            found = found.narrow(axis, width, ctx.orig_input_shape[axis])
    set_grad_sample_if_exists(ctx.weight, lambda w: rows)
    set_grad_sample_if_exists(
        ctx.bias, lambda b: grad_output.flatten(2).sum(2, dtype=wide(grad_output.dtype)).to(b.dtype)
    )
    wanted = found if ctx.input_required_grad else None
    return None, None, wanted, None, None, None, None, None, None


def conv_unfold_weight_grad_sample(
    input: Tensor,
    grad_output: Tensor,
    weight_shape: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
    func: Callable[..., Any],
) -> Tensor:
    """Σₚ gᵢₚ xᵢₚᵀ over output positions p, (n, *weight_shape); padding may be a string, too.

    >>> x, grad = torch.randn(5, 4, 8), torch.randn(5, 6, 6)
    >>> conv_unfold_weight_grad_sample(x, grad, (6, 2, 3), (3,), 1, 0, 1, 2, F.conv1d).shape
    torch.Size([5, 6, 2, 3])
    """
    weight = input.new_zeros(weight_shape)
    return _gradients(func, input, weight, grad_output, stride, padding, dilation, groups)[1]


def conv_group_weight_grad_sample(
    input: Tensor,
    grad_output: Tensor,
    weight_shape: Sequence[int],
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    batch_size: int,
    func: Callable[..., Any],
) -> Tensor:
    """The same gradients; the groups are those that the channels imply."""
    if input.shape[0] != batch_size:
        raise UsageError(
            f"an input of {input.shape[0]} samples for a batch size of {batch_size}",
            fix="pass input.shape[0]",
        )
    groups = input.shape[1] // weight_shape[1]
    return conv_unfold_weight_grad_sample(
        input, grad_output, weight_shape, weight_shape[2:], stride, padding, dilation, groups, func
    )


def unfold3d(
    tensor: Tensor, kernel_size: Sizes, padding: Sizes, stride: Sizes, dilation: Sizes
) -> Tensor:
    """The patches of volumes as columns, as ``F.unfold`` has those of images.

    (n, c, depth, height, width) becomes (n, c · taps, positions).

    >>> unfold3d(torch.randn(2, 3, 4, 5, 6), (2, 2, 2), 0, 1, (1, 2, 1)).shape
    torch.Size([2, 24, 45])
    """
    if tensor.dim() != 5:
        raise UsageError(
            "Input tensor must be of the shape [B, C, D, H, W]. Got " + str(tuple(tensor.shape)),
            fix="add the missing axes: x.unsqueeze(0)",
        )
    kernel, steps, pads, apart = (
        _each_axis(value, 3) for value in (kernel_size, stride, padding, dilation)
    )
    return unfold(tensor, torch.Size(kernel), Geometry(steps, pads, apart, False, (0, 0, 0), 1))


def _gradients(
    func: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Of the input, and of the weight for every sample: each has a copy of its own."""
    n = x.shape[0]
    with torch.enable_grad():
        image = x.detach().reshape(1, -1, *x.shape[2:]).requires_grad_()
        copies = weight.detach().repeat(n, *[1] * (weight.dim() - 1)).requires_grad_()
        out = func(image, copies, None, stride, padding, dilation, n * groups)
        seed = grad.reshape(out.shape).to(out.dtype)
        found, rows = torch.autograd.grad(out, (image, copies), seed)
    return found.view(x.shape), rows.view(n, *weight.shape)
