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
    """Patches as columns: (n, c · taps, positions), for one or two spatial axes."""
    g = geometry
    if x.dim() == 3:
        return F.unfold(
            x.unsqueeze(2), (1, kernel[0]), (1, g.dilation[0]), (0, g.padding[0]), (1, g.stride[0])
        )
    return F.unfold(x, tuple(kernel), g.dilation, g.padding, g.stride)
