"""Inner products of all pairs of patches of an image, without writing the patches out.

⟨patch p, patch q⟩ = Σ over taps τ of ⟨x[p + τ], x[q + τ]⟩: the products of all pairs of pixels are
one small matrix product; taps are then added up along each spatial axis in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
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
    if any(padding):
        widths = [p for p in reversed(padding) for _ in (0, 1)]
        products = F.pad(products, widths + widths)
    for axis in range(axes):
        products = _summed(
            products, 2 + axis, 2 + axes + axis, kernel[axis], out[axis], stride[axis],
            dilation[axis],
        )  # fmt: skip
    positions = 1
    for size in out:
        positions *= size
    return products.reshape(n, g, positions, positions)


def _summed(
    products: Tensor, one: int, two: int, taps: int, count: int, stride: int, dilation: int
) -> Tensor:
    """Add up the taps of one spatial axis, which both pixels move along together."""
    total: Tensor | None = None
    reach = stride * (count - 1) + 1
    for tap in range(taps):
        start = tap * dilation
        index = [slice(None)] * products.dim()
        index[one] = index[two] = slice(start, start + reach, stride)
        part = products[tuple(index)]
        if total is None:
            total = part if taps == 1 else part.clone()
        else:
            total += part
    assert total is not None
    return total
