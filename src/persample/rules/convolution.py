"""Convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..forms import Dense, Geometry, Patches, wide
from ..layouts.layout import Layout
from ..uses.use import Firing, Use
from .by_sample import Unsuited
from .table import Forms, rule


def _each(value: Any, axes: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * axes
    values = tuple(int(v) for v in value)
    return values * axes if len(values) == 1 else values


def _images(x: Tensor, layout: Layout, n: int) -> tuple[Tensor, int]:
    """Images with those of one sample side by side, and how many each has."""
    if n == 1:
        return x, x.shape[0]
    if layout.ids is not None or layout.axis != 0 or n == 0:
        raise Unsuited
    inner = layout.inner
    outer = x.shape[0] // (n * inner)
    if outer > 1:
        x = x.reshape(outer, n, inner, *x.shape[1:]).transpose(0, 1).flatten(0, 2)
    return x, outer * inner


@rule("conv1d conv2d conv3d")
def convolution(use: Use, firing: Firing, n: int) -> Forms:
    """Padding given as a string is turned into numbers, the odd element padded first."""
    x, weight, _, stride, padding, dilation, groups = use.bind(
        firing, "input", "weight", "bias", "stride", "padding", "dilation", "groups"
    )
    axes = weight.dim() - 2
    steps = _each(1 if stride is None else stride, axes)
    dilations = _each(1 if dilation is None else dilation, axes)
    if padding == "same":
        widths = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        if any(w % 2 for w in widths):
            x = F.pad(x, [v for w in reversed(widths) for v in (0, w % 2)])
        pads = tuple(w // 2 for w in widths)
    else:
        pads = _each(0 if padding in ("valid", None) else padding, axes)
    geometry = Geometry(steps, pads, dilations, False, (0,) * axes, 1 if groups is None else groups)
    return _forms(use, firing, x, weight, geometry, n)


@rule("conv_transpose1d conv_transpose2d conv_transpose3d")
def transposed(use: Use, firing: Firing, n: int) -> Forms:
    """Roles of input and output gradient swapped; torch's own kernel knows how."""
    x, weight, _, stride, padding, extra, groups, dilation = use.bind(
        firing, "input", "weight", "bias", "stride", "padding", "output_padding", "groups",
        "dilation",
    )  # fmt: skip
    axes = weight.dim() - 2
    geometry = Geometry(
        _each(1 if stride is None else stride, axes),
        _each(0 if padding is None else padding, axes),
        _each(1 if dilation is None else dilation, axes),
        True,
        _each(0 if extra is None else extra, axes),
        1 if groups is None else groups,
    )
    return _forms(use, firing, x, weight, geometry, n)


def _forms(
    use: Use, firing: Firing, x: Tensor, weight: Tensor, geometry: Geometry, n: int
) -> Forms:
    grad, layout = firing.grads[0], use.out_layouts[0]
    if grad is None or grad.is_complex() or any(o.value is x for o in use.operands):
        raise Unsuited
    if x.dim() != weight.dim():  # an image without a batch
        if n != 1:
            raise Unsuited
        x, grad = x.unsqueeze(0), grad.unsqueeze(0)
    ordered, images = _images(grad.contiguous(), layout, n)
    found: Forms = []
    for operand in use.operands:
        if operand.value is weight:
            data, _ = _images(x.contiguous(), layout, n)
            found.append(Patches(data, ordered, weight.detach(), geometry, images))
        else:
            rows = ordered.flatten(2).sum(2, dtype=wide(grad.dtype))
            found.append(Dense(rows.view(n, images, -1).sum(1)))
    return found
