"""Gradients of one convolution: of its weight for every sample, and of its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..forms import Geometry, Patches

Sizes = int | Sequence[int]


def geometry_of(axes: int, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> Geometry:
    """The arguments of a convolution, one number for each axis."""
    steps, pads, apart = (each_axis(value, axes) for value in (stride, padding, dilation))
    return Geometry(steps, pads, apart, False, (0,) * axes, groups)


def each_axis(value: Sizes, axes: int) -> tuple[int, ...]:
    """One number for each axis."""
    if isinstance(value, int):
        return (value,) * axes
    values = tuple(int(v) for v in value)
    return values * axes if len(values) == 1 else values


def weight_rows(
    func: Callable[..., Any], x: Tensor, grad: Tensor, shape: torch.Size, geometry: Geometry
) -> Tensor:
    """The weight's gradients: (n, *shape), float32 at least."""
    if x.is_complex() or grad.is_complex():
        return _complex_rows(func, x, grad, shape, geometry)
    weight = torch.empty(shape, dtype=grad.dtype, device="meta")  # only its shape is looked at
    return Patches(x.contiguous(), grad.contiguous(), weight, geometry).wide_dense()


def _complex_rows(
    func: Callable[..., Any], x: Tensor, grad: Tensor, shape: torch.Size, geometry: Geometry
) -> Tensor:
    """By autograd, each sample a group: torch has no kernel for complex weight gradients."""
    n, g = x.shape[0], geometry
    with torch.enable_grad():
        weight = grad.new_zeros((n * shape[0], *shape[1:])).requires_grad_()
        image = x.detach().reshape(1, -1, *x.shape[2:])
        out = func(image, weight, None, g.stride, g.padding, g.dilation, g.groups * n)
        (rows,) = torch.autograd.grad(out, weight, grad.reshape(out.shape))
    return rows.view(n, *shape)


def input_grad(
    func: Callable[..., Any], x: Tensor, weight: Tensor, grad: Tensor, geometry: Geometry
) -> Tensor:
    """The input's gradient, by torch's kernel."""
    g = geometry
    if grad.is_complex():
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = func(leaf, weight.detach(), None, g.stride, g.padding, g.dilation, g.groups)
            return torch.autograd.grad(out, leaf, grad)[0]
    found: Tensor = torch.ops.aten.convolution_backward(
        grad, x.to(grad.dtype), weight.to(grad.dtype), None, g.stride, g.padding, g.dilation,
        False, g.output_padding, g.groups, [True, False, False],
    )[0]  # fmt: skip
    return found.to(x.dtype)


def inside(found: Tensor, shape: torch.Size, before: Sequence[int]) -> Tensor:
    """What belongs to an input of this shape, without its padding; ``before``: first axis first."""
    for axis, width in enumerate(before, start=2):
        found = found.narrow(axis, width, shape[axis])
    return found
