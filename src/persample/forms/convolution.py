"""Convolutions: their arguments, their patches written out, and norms from products of positions.

⟨patch p, patch q⟩ = Σ over taps τ of ⟨x[p + τ], x[q + τ]⟩: the products of all pairs of pixels are
one small matrix product; taps are then added up along each spatial axis in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cost import spans
from .form import wide
from .matrix_products import rows_by_rows
from .rounding import Products, join_samples, multiply_products


@dataclass(frozen=True, slots=True)
class Geometry:
    """The arguments of a convolution, one entry per spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def unfold(x: Tensor, kernel: torch.Size, geometry: Geometry) -> Tensor:
    """Patches as columns: (n, c · taps, positions)."""
    axes = len(kernel)
    if any(geometry.padding):
        x = F.pad(x, [width for p in reversed(geometry.padding) for width in (p, p)])
    for axis, (taps, apart) in enumerate(zip(kernel, geometry.dilation, strict=True)):
        windows = x.unfold(2 + axis, apart * (taps - 1) + 1, geometry.stride[axis])
        x = windows[..., ::apart] if apart > 1 else windows
    order = [0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes)]
    return x.permute(order).reshape(x.shape[0], x.shape[1] * kernel.numel(), -1)


def patch_products(
    x: Tensor,
    kernel: Sequence[int],
    out: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """(n, g, c, *spatial) to (n, g, positions, positions)."""
    n, g = x.shape[:2]
    axes = len(kernel)
    spatial = x.shape[3:]
    pixels = x.flatten(3).mT
    products = rows_by_rows(pixels, pixels).view(n, g, *spatial, *spatial)
    for axis in range(axes):
        products = _sum_taps(
            products, 2 + axis, 2 + axes + axis, kernel[axis], out[axis], stride[axis],
            padding[axis], dilation[axis],
        )  # fmt: skip
    positions = math.prod(out)
    return products.reshape(n, g, positions, positions)


def _sum_taps(
    products: Tensor,
    one: int,
    two: int,
    taps: int,
    count: int,
    stride: int,
    padding: int,
    dilation: int,
) -> Tensor:
    """Add up the taps of one spatial axis, which both pixels move along together.

    Pixels of the padding are zeros: positions whose tap falls there get nothing from it.
    """
    size, shape = products.shape[one], list(products.shape)
    shape[one] = shape[two] = count
    total = products.new_zeros(shape)
    for tap in range(taps):
        shift = tap * dilation - padding
        low, high = max(0, -(shift // stride)), min(count, (size - 1 - shift) // stride + 1)
        source: list[slice] = [slice(None)] * products.dim()
        target = list(source)
        first, last = low * stride + shift, (high - 1) * stride + shift
        source[one] = source[two] = slice(first, last + 1, stride)
        target[one] = target[two] = slice(low, high)
        if low < high:
            total[tuple(target)] += products[tuple(source)]
    return total


def unfold_first(x: Tensor, grad: Tensor, shape: torch.Size) -> bool:
    """Whether products of patches are cheaper than products of all pixels (large strides)."""
    p, s = grad.shape[2:].numel(), x.shape[2:].numel()
    return x.dim() <= 4 and s * s > p * (p + 24) * shape[2:].numel()


def positions_pay(x: Tensor, grad: Tensor, shape: torch.Size, geometry: Geometry) -> bool:
    """Products of positions against the rows themselves, in multiplications."""
    if geometry.transposed:
        return False
    p, s = grad.shape[2:].numel(), x.shape[2:].numel()
    o, c, taps = shape[0], x.shape[1], shape[2:].numel()
    if unfold_first(x, grad, shape):
        products = p * c * taps * (p + 24)  # writing a patch out is slow
    else:
        products = s * s * c + 16 * p * p * geometry.groups * sum(shape[2:])
    return p * p * o + products < p * o * (c // geometry.groups) * taps


def by_positions(x: Tensor, grad: Tensor, shape: torch.Size, geometry: Geometry) -> Products:
    """‖gᵢ‖² = Σ over pairs of positions, and what :func:`multiply_products` says of it."""
    dtype, groups, n = wide(grad.dtype), geometry.groups, grad.shape[0]
    lengths = shape[0] // groups, shape[1:].numel()
    pixels = 0 if unfold_first(x, grad, shape) else x.shape[2:].numel()
    item, found = 4 * groups * (pixels + grad.shape[2:].numel()) ** 2, []
    for first, last in spans(n, item, 4 << 20):
        some = grad[first:last].to(dtype).unflatten(1, (groups, -1)).flatten(3).mT
        patches = _of_patches(x[first:last].to(dtype), grad, shape, geometry)
        found.append(multiply_products(rows_by_rows(some, some), patches, *lengths))
    return join_samples(found)


def _of_patches(x: Tensor, grad: Tensor, shape: torch.Size, g: Geometry) -> Tensor:
    if unfold_first(x, grad, shape):
        columns = unfold(x, shape[2:], g).unflatten(1, (g.groups, -1)).mT
        return rows_by_rows(columns, columns)
    x = x.unflatten(1, (g.groups, -1))
    return patch_products(x, shape[2:], grad.shape[2:], g.stride, g.padding, g.dilation)
