"""A convolution's gradients, one for every output position of every sample."""

from __future__ import annotations

import torch
from torch import Tensor

from .form import Form, real, wide
from .mapped import Composite
from .patches import Patches


class Pixels(Composite):
    """gᵢₜ is the weight gradient of image i whose output gradient is kept at position t alone.

    Row i · positions + t; positions are the output's pixels in row-major order.
    """

    __slots__ = ("first", "last", "patches", "positions")

    def __init__(self, patches: Patches, first: int = 0, last: int | None = None) -> None:
        self.positions = patches.grad.shape[2:].numel()
        self.first = first
        self.last = patches.n * self.positions if last is None else last
        count = self.last - first
        super().__init__([patches], count, patches.shape, patches.dtype, patches.device)
        self.patches = patches

    def without(self, bad: Tensor) -> Form:
        """Of whole images only."""
        raise NotImplementedError

    def narrowed(self, first: int, last: int) -> Form:
        """Some of the rows."""
        return Pixels(self.patches, self.first + first, self.first + last)

    def _images(self) -> tuple[Patches, int, int]:
        """The images that the rows are of, and where the rows start and stop in them."""
        p, each = self.patches, max(self.positions, 1)
        low, high = self.first // each, -(-self.last // each)
        some = Patches(p.x[low:high], p.grad[low:high], p.weight, p.geometry)
        return some, self.first - low * each, self.last - low * each

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Each row from a copy of its image."""
        rows = torch.arange(first, self.n if last is None else last, device=self.device)
        image, at = (rows + self.first) // self.positions, (rows + self.first) % self.positions
        p = self.patches
        grad = p.grad.new_zeros(rows.numel(), p.grad.shape[1], self.positions)
        picked = p.grad.flatten(2)[image, :, at]
        grad.scatter_(2, at.view(-1, 1, 1).expand(-1, p.grad.shape[1], 1), picked.unsqueeze(2))
        return Patches(p.x[image], grad.view(-1, *p.grad.shape[1:]), p.weight, p.geometry).dense()

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """One weight gradient with scaled pixels."""
        some, start, stop = self._images()
        scale = torch.zeros(some.n * self.positions, dtype=wide(self.dtype), device=self.device)
        scale[start:stop] = c.to(scale.dtype)
        grad = some.grad.to(scale.dtype) * scale.view(some.n, 1, *some.grad.shape[2:])
        whole = Patches(some.x, grad, some.weight, some.geometry)
        return whole.weighted_sum(torch.ones(some.n, dtype=grad.dtype, device=self.device))

    def dot(self, direction: Tensor) -> Tensor:
        """⟨conv(x, V), g⟩ pixel by pixel."""
        some, start, stop = self._images()
        if self.dtype.is_complex or some.n == 0:
            return super().dot(direction)
        g, dtype = some.geometry, wide(self.dtype)
        moved: Tensor = torch.ops.aten.convolution(
            some.x.to(dtype), direction.to(dtype), None, g.stride, g.padding, g.dilation,
            g.transposed, g.output_padding, g.groups,
        )  # fmt: skip
        each = (moved * some.grad.to(dtype)).flatten(2).sum(1).flatten()
        return each[start:stop].to(real(self.dtype))
