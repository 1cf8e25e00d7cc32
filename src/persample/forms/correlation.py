"""Inner products of all pairs of patches of an image, without writing the patches out.

⟨patch p, patch q⟩ = Σ over taps τ of ⟨x[p + τ], x[q + τ]⟩: the products of all pairs of pixels are
one small matrix product; taps are then added up along each spatial axis in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


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
    pixels = x.flatten(3)
    products = torch.matmul(pixels.mT, pixels).view(n, g, *spatial, *spatial)
    for axis in range(axes):
        products = _summed(
            products, 2 + axis, 2 + axes + axis, kernel[axis], out[axis], stride[axis],
            padding[axis], dilation[axis],
        )  # fmt: skip
    positions = math.prod(out)
    return products.reshape(n, g, positions, positions)


def _summed(
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
    size, everything = products.shape[one], [slice(None)] * products.dim()
    parts = []
    for tap in range(taps):
        shift = tap * dilation - padding
        low, high = max(0, -(shift // stride)), min(count, (size - 1 - shift) // stride + 1)
        if low >= high:
            continue
        source, target = list(everything), list(everything)
        first = low * stride + shift
        source[one] = source[two] = slice(first, first + (high - low - 1) * stride + 1, stride)
        target[one] = target[two] = slice(low, high)
        parts.append((high - low == count, products[tuple(source)], tuple(target)))
    whole = next((k for k, (all_, _, _) in enumerate(parts) if all_), None)
    if whole is None:
        shape = list(products.shape)
        shape[one] = shape[two] = count
        total = products.new_zeros(shape)
    else:
        total = parts.pop(whole)[1]
        total = total.clone(memory_format=torch.contiguous_format) if parts else total
    for _, part, place in parts:
        total[place] += part
    return total
