"""Convolutions: sums over output positions of output gradient times input patch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cost import Plan, cheapest, scratch, spans
from .form import Form, real, wide
from .outer import Outer
from .sketch import Sketch


@dataclass(frozen=True, slots=True)
class Geometry:
    """The arguments of a convolution, one entry per spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


class Patches(Form):
    """gᵢ is the weight gradient of a convolution of x[i] with output gradient g[i].

    ``x`` is (n, c, *spatial), already padded where padding is not zeros; ``grad`` is (n, o, *out).
    Samples may consist of several images: ``images`` per sample, consecutive.
    """

    __slots__ = ("geometry", "grad", "images", "weight", "x")

    def __init__(
        self, x: Tensor, grad: Tensor, weight: Tensor, geometry: Geometry, images: int = 1
    ) -> None:
        super().__init__(x.shape[0] // images, weight.shape, grad.dtype, grad.device)
        self.x, self.grad, self.weight = x.to(grad.dtype), grad, weight
        self.geometry, self.images = geometry, images

    def tensors(self) -> list[Tensor]:
        """What the form is made of."""
        return [self.x, self.grad]

    def nbytes(self) -> int:
        """Bytes of input and output gradient."""
        return sum(t.numel() * t.element_size() for t in (self.x, self.grad))

    def work(self) -> int:
        """One product per output position (or input position, transposed)."""
        spatial = (self.x if self.geometry.transposed else self.grad).shape[2:].numel()
        return self.n * self.images * spatial * self.size

    def without(self, bad: Tensor) -> Patches:
        """Zero images for some samples."""
        mask = bad.repeat_interleave(self.images).view(-1, *[1] * (self.x.dim() - 1))
        x, grad = self.x.masked_fill(mask, 0), self.grad.masked_fill(mask, 0)
        return Patches(x, grad, self.weight, self.geometry, self.images)

    def narrowed(self, first: int, last: int) -> Patches:
        """Some samples' images."""
        part = slice(first * self.images, last * self.images)
        return Patches(self.x[part], self.grad[part], self.weight, self.geometry, self.images)

    # ------------------------------------------------------------------ dense

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """By the cheaper of two ways for these sizes."""
        last = self.n if last is None else last
        if last <= first:
            return self.grad.new_zeros(0, *self.shape)
        if self._unfolds():
            return self._outer(first, last).dense()
        return self._folded(first, last)

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """From a widened input and output gradient."""
        dtype = wide(self.dtype)
        if self.dtype == dtype:
            return self.dense(first, last)
        m = self.images
        part = slice(first * m, None if last is None else last * m)
        x, grad = self.x[part].to(dtype), self.grad[part].to(dtype)
        return Patches(x, grad, self.weight, self.geometry, m).dense()

    def _folded(self, first: int, last: int) -> Tensor:
        """All images in one convolution, each image a group of its own."""
        m = self.images
        x, grad = self.x[first * m : last * m], self.grad[first * m : last * m]
        count, g = x.shape[0], self.geometry
        # only its sizes are looked at, so a single number stands for all copies of the weight
        sizes = (count * self.shape[0], *self.shape[1:])
        weight = grad.new_zeros(()).expand(sizes)
        found: Tensor = torch.ops.aten.convolution_backward(
            grad.reshape(1, -1, *grad.shape[2:]), x.reshape(1, -1, *x.shape[2:]), weight, None,
            g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups * count,
            [False, True, False],
        )[1]  # fmt: skip
        rows: Tensor = found.view(last - first, m, *self.shape)
        return rows.sum(1) if m > 1 else rows[:, 0]

    def _unfolds(self) -> bool:
        """Small maps with many channels are faster as matrix products."""
        g = self.geometry
        if g.transposed or g.groups != 1 or self.x.dim() > 4 or self.dtype.is_complex:
            return False
        if any(k != s for k, s in zip(self.shape[2:], g.stride, strict=True)) or any(g.padding):
            positions = self.grad.shape[2:].numel()
            return positions <= 16 or (positions <= 64 and self.x.shape[1] >= 128)
        return all(d == 1 for d in g.dilation)  # patches that do not overlap

    def _outer(self, first: int, last: int) -> Outer:
        """As an Outer form over output positions (images of a sample are more positions)."""
        m = self.images
        x, grad = self.x[first * m : last * m], self.grad[first * m : last * m]
        columns = unfold(x, self.shape[2:], self.geometry)
        n, o, b = last - first, self.shape[0], columns.shape[1]
        left = grad.flatten(2).view(n, m, o, -1).transpose(2, 3).reshape(n, 1, -1, o)
        right = columns.view(n, m, b, -1).transpose(2, 3).reshape(n, 1, -1, b)
        return Outer(left, right, self.shape)

    # ------------------------------------------------------------------ queries

    def plan(self) -> Plan:
        """Products of unfolded patches on small maps, else the weight gradients themselves."""
        n, width = self.n, wide(self.dtype).itemsize
        rows = super().plan()
        if self.geometry.transposed or self.geometry.groups != 1 or self.x.dim() > 4:
            return rows
        if self.dtype.is_complex:
            return rows
        t = self.grad.shape[2:].numel() * self.images
        a, b = self.shape[0], self.size // max(self.shape[0], 1)
        item = t * (b + 2 * t) * width
        return cheapest(Plan("gram", n * t * t * (a + b), n * item, item, n), rows)

    def sq_norms(self) -> Tensor:
        """Position products on small maps, else the rows, a few at a time."""
        if self.dtype.is_complex or self.n == 0:
            return super().sq_norms()
        plan = self.plan()
        out = self.grad.new_zeros(self.n, dtype=real(self.dtype))
        if plan.way == "gram":
            for first, last in spans(self.n, plan.item):
                out[first:last] = self._outer(first, last).sq_norms()
            return out
        for first, last in spans(self.n, plan.item, 16 << 20):
            rows = self.wide_dense(first, last)
            out[first:last] = rows.flatten(1).square().sum(1)
        return out

    def sq_bounds(self) -> Tensor:
        """Rows computed directly; rounding is relative to what was added up."""
        if self.dtype in (torch.float64, torch.complex128):
            return self.sq_norms()
        found = self.sq_norms()
        m = self.images
        energy = self.x.float().flatten(1).square().sum(1).view(-1, m)
        other = self.grad.float().flatten(1).square().sum(1).view(-1, m)
        taps = self.shape[2:].numel()
        sizes = (energy * other * taps).sqrt_().sum(1).square()
        slack = torch.finfo(torch.float32).eps ** 2 * 1e4 * sizes
        gap = 2 * found.sqrt() * slack.sqrt() + slack
        loose = gap > 1e-3 * found
        bound = found + gap
        if bool(loose.any()):
            for i in loose.nonzero().flatten().tolist():
                part = slice(i * m, (i + 1) * m)
                exact = Patches(
                    self.x[part].double(), self.grad[part].double(), self.weight, self.geometry, m
                )
                bound[i] = exact.sq_norms()[0] * (1 + 1e-6)
        return bound

    def weighted_sum(self, c: Tensor) -> Tensor:
        """One ordinary weight gradient with scaled output gradients."""
        dtype, g = wide(self.dtype), self.geometry
        scale = c.to(dtype).repeat_interleave(self.images)
        if self.n == 0 or (self.n > 1 and self._copies() > scratch()):
            total = torch.zeros(self.shape, dtype=dtype, device=self.device)
            for first, last in spans(self.n, self._copies() // max(self.n, 1)):
                total += self.narrowed(first, last).weighted_sum(c[first:last])
            return total
        grad = self.grad.to(dtype) * scale.view(-1, *[1] * (self.grad.dim() - 1))
        found: Tensor = torch.ops.aten.convolution_backward(
            grad, self.x.to(dtype), self.weight.to(dtype), None, g.stride, g.padding, g.dilation,
            g.transposed, g.output_padding, g.groups, [False, True, False],
        )[1]  # fmt: skip
        return found

    def dot(self, direction: Tensor) -> Tensor:
        """⟨conv(x, V), g⟩ image by image."""
        if self.dtype.is_complex or self.n == 0:
            return super().dot(direction)
        dtype, g = wide(self.dtype), self.geometry
        if self.n > 1 and self._copies() > scratch():
            runs = spans(self.n, self._copies() // self.n)
            return torch.cat([self.narrowed(*run).dot(direction) for run in runs])
        moved: Tensor = torch.ops.aten.convolution(
            self.x.to(dtype), direction.to(dtype), None, g.stride, g.padding, g.dilation,
            g.transposed, g.output_padding, g.groups,
        )  # fmt: skip
        each: Tensor = (moved * self.grad.to(dtype)).flatten(1).sum(1)
        return each.view(self.n, self.images).sum(1)

    def _copies(self) -> int:
        """Scratch memory for a scaled output gradient, and for widened factors."""
        width = wide(self.dtype).itemsize
        widened = (self.x.numel() + self.grad.numel()) * width if self.dtype.itemsize < width else 0
        return 2 * self.grad.numel() * width + widened

    def project(self, sketch: Sketch) -> Tensor:
        """As matrix products where the patches can be unfolded."""
        if self.geometry.transposed or self.geometry.groups != 1 or self.x.dim() > 4:
            return super().project(sketch)
        if self.dtype.is_complex or self.n == 0:
            return super().project(sketch)
        positions = self.grad.shape[2:].numel() * self.images
        out = self.grad.new_zeros(self.n, sketch.dim, dtype=wide(self.dtype))
        for first, last in spans(self.n, positions * self.size // max(self.shape[0], 1) * 8):
            out[first:last] = self._outer(first, last).project(sketch)
        return out


def unfold(x: Tensor, kernel: torch.Size, geometry: Geometry) -> Tensor:
    """Patches as columns: (n, c · taps, positions), for one or two spatial axes."""
    g = geometry
    if x.dim() == 3:
        return F.unfold(
            x.unsqueeze(2), (1, kernel[0]), (1, g.dilation[0]), (0, g.padding[0]), (1, g.stride[0])
        )
    return F.unfold(x, tuple(kernel), g.dilation, g.padding, g.stride)
