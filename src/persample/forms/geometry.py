"""The arguments of a convolution, and its patches written out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


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
        x = windows[..., ::apart]
    order = [0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes)]
    return x.permute(order).reshape(x.shape[0], x.shape[1] * kernel.numel(), -1)
