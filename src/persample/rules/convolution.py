"""Convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..forms import Dense, Form, Geometry, Patches, wide
from ..layouts import Layout
from ..uses import Firing, Operand, Use
from .table import Forms, Unsuited, only_output, rule

_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_ARGUMENTS[:5], "output_padding", "groups", "dilation")


def _each(value: Any, axes: int, default: int) -> tuple[int, ...]:
    """One number for each axis."""
    if value is None or isinstance(value, int):
        return (default if value is None else value,) * axes
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
    x = x.reshape(outer, n, inner, *x.shape[1:]).transpose(0, 1).flatten(0, 2)
    return x, outer * inner


@rule("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
def convolution(use: Use, firing: Firing, n: int) -> Forms:
    """Padding given as a string is turned into numbers, the odd element padded first.

    Transposed, roles of input and output gradient are swapped; torch's own kernel knows how.
    """
    transposed = use.operator.startswith("conv_transpose")
    names = _TRANSPOSED if transposed else _ARGUMENTS
    given = dict(zip(names, use.bind(firing, *names), strict=True))
    x, weight, padding = given["input"], given["weight"], given["padding"]
    axes = weight.dim() - 2
    dilation = _each(given["dilation"], axes, 1)
    if padding == "same":
        padding = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(w % 2 for w in padding):
            x = F.pad(x, [v for w in reversed(padding) for v in (0, w % 2)])
        padding = [w // 2 for w in padding]
    geometry = Geometry(
        _each(given["stride"], axes, 1), _each(None if padding == "valid" else padding, axes, 0),
        dilation, transposed, _each(given.get("output_padding"), axes, 0), given["groups"] or 1,
    )  # fmt: skip
    grad, layout = only_output(use, firing)
    alone = x.dim() != weight.dim()  # an image without a batch
    if grad.is_complex() or any(o.value is x for o in use.operands) or (alone and n != 1):
        raise Unsuited
    if alone:
        x, grad = x.unsqueeze(0), grad.unsqueeze(0)
    ordered, images = _images(grad.contiguous(), layout, n)

    def form(operand: Operand) -> Form:
        if operand.value is weight:
            data, _ = _images(x.contiguous(), layout, n)
            return Patches(data, ordered, weight.detach(), geometry, images)
        rows = ordered.flatten(2).sum(2, dtype=wide(grad.dtype))
        return Dense(rows.view(n, images, -1).sum(1))

    return [form(operand) for operand in use.operands]
