"""Convolutions: sums over output positions of output gradient times input patch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .convolution import Geometry, by_positions, positions_pay, unfold, unfold_first
from .cost import Plan, scratch, spans
from .form import Form, real, wide
from .outer import Outer
from .rounding import Norms, error_units, norms_of_last_axis, sq_error_of_products, units
from .sketch import Sketch

_COLUMNS = 8 << 20  # bytes of patches that are written out at once
_LITTLE = 1 << 20  # bytes of patches that are not worth cutting


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

    def work(self) -> int:
        """One product per output position (or input position, transposed)."""
        return self.n * self.images * self._positions() * self.size

    def _positions(self) -> int:
        return (self.x if self.geometry.transposed else self.grad).shape[2:].numel()

    def without(self, bad: Tensor) -> Patches:
        """Zero images for some samples."""
        mask = bad.repeat_interleave(self.images).view(-1, *[1] * (self.x.dim() - 1))
        x, grad = self.x.masked_fill(mask, 0), self.grad.masked_fill(mask, 0)
        return Patches(x, grad, self.weight, self.geometry, self.images)

    def narrowed(self, first: int, last: int) -> Patches:
        """Some samples' images."""
        part = slice(first * self.images, last * self.images)
        return Patches(self.x[part], self.grad[part], self.weight, self.geometry, self.images)

    def cut(self, first: int, last: int) -> Patches | None:
        """Some output channels (of transposed convolutions, input channels)."""
        part, x, grad = slice(first, last), self.x, self.grad
        if self.geometry.groups != 1:
            return None
        x, grad = (x[:, part], grad) if self.geometry.transposed else (x, grad[:, part])
        return Patches(x, grad, self.weight[part], self.geometry, self.images)

    def converted(self, dtype: torch.dtype) -> Patches:
        """From a converted input and output gradient."""
        x, grad = self.x.to(dtype), self.grad.to(dtype)
        return Patches(x, grad, self.weight, self.geometry, self.images)

    # ------------------------------------------------------------------ dense

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """By the cheaper of two ways for these sizes."""
        last = self.n if last is None else last
        if last <= first:
            return self.grad.new_zeros(0, *self.shape)
        if self._unfolds():
            part = self if last - first == self.n else self.narrowed(first, last)
            return part.write(self.grad.new_empty(part.n, *self.shape))
        return self._fold(first, last)

    def rows_by(self) -> str:
        """The cheaper of two ways for these sizes."""
        return "patches" if self._unfolds() else "grouped convolution"

    def _fold(self, first: int, last: int) -> Tensor:
        """All images in one convolution, each image a group of its own."""
        m = self.images
        x, grad = self.x[first * m : last * m], self.grad[first * m : last * m]
        count, g = x.shape[0], self.geometry
        # only its sizes are looked at; one number in the place of all would be copied out
        weight = grad.new_empty((count * self.shape[0], *self.shape[1:]))
        found: Tensor = torch.ops.aten.convolution_backward(
            _one_image(grad), _one_image(x), weight, None,
            g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups * count,
            [False, True, False],
        )[1]  # fmt: skip
        rows: Tensor = found.view(last - first, m, *self.shape)
        return rows.sum(1) if m > 1 else rows[:, 0]

    def _unfolds(self) -> bool:
        """Few channels, and small maps with many, are faster as matrix products."""
        g, (o, c), positions = self.geometry, self.shape[:2], self.grad.shape[2:].numel()
        if g.transposed or g.groups != 1 or self.dtype.is_complex:
            return False
        if c <= 4 or (c <= 8 and o >= 64):
            return True
        if self.x.dim() <= 4 and positions <= 64:
            if positions <= 16 or o >= 128 or (o >= 64 and c >= 256):
                return True
        apart = all(k == s for k, s in zip(self.shape[2:], g.stride, strict=True))
        return apart and not any(g.padding) and all(d == 1 for d in g.dilation)

    def _outer(self, first: int, last: int) -> Outer:
        """As an Outer form over output positions (images of a sample are more positions)."""
        m = self.images
        x, grad = self.x[first * m : last * m], self.grad[first * m : last * m]
        left, right = grad.flatten(2).mT, unfold(x, self.shape[2:], self.geometry).mT
        if m > 1:
            left, right = (f.reshape(last - first, -1, f.shape[2]) for f in (left, right))
        return Outer(left, right, self.shape)

    def write(self, out: Tensor) -> Tensor:
        """Straight into the buffer where matrix products make the rows."""
        if not self._unfolds() or out.dtype != self.dtype:
            return super().write(out)
        width = self.grad.shape[2:].numel() * self.images * self.size // max(self.shape[0], 1)
        room = min(_COLUMNS, max(_LITTLE, self.nbytes()))
        for first, last in spans(self.n, self.dtype.itemsize * width, room):
            self._outer(first, last).write(out[first:last])
        return out

    # ------------------------------------------------------------------ queries

    def plan(self) -> Plan:
        """Products of positions where they are few, else the weight gradients themselves."""
        g, inapt = self.geometry, self.dtype.is_complex or self.n == 0 or self.images != 1
        if inapt or not positions_pay(self.x, self.grad, self.shape, g):
            return super().plan()
        p, s = self.grad.shape[2:].numel(), self.x.shape[2:].numel()
        pixels = p if unfold_first(self.x, self.grad, self.shape) else s
        item = g.groups * (p + pixels) ** 2 * wide(self.dtype).itemsize
        if item > scratch():
            return super().plan()
        flops = self.n * (p * p * self.shape[0] + pixels * pixels * self.x.shape[1])
        return Plan("gram", flops, self.n * item, item, self.n)

    def norms(self) -> Norms:
        """Position products on small maps, else the rows, a few at a time."""
        if self.plan().way != "gram":
            found = self.norms_of_rows(16 << 20)
            return found if self.dtype.is_complex else found._replace(exact=self.exact_sq_norms)
        value, doubt, diagonals = by_positions(self.x, self.grad, self.shape, self.geometry)
        t = self.grad.shape[2:].numel()
        return Norms(
            value, doubt, lambda: sq_error_of_products(diagonals, doubt, t, self.size),
            units(self.size), exact=self.exact_sq_norms,
        )  # fmt: skip

    def _sizes(self) -> Tensor:
        """‖x‖‖g‖√taps of all groups, which no gradient exceeds however its positions cancel."""
        groups, dtype = self.geometry.groups, wide(self.dtype)
        x, grad = (f.to(dtype).flatten(1).unflatten(1, (groups, -1)) for f in (self.x, self.grad))
        each = norms_of_last_axis(x) * norms_of_last_axis(grad)
        each = each[:, 0] if groups == 1 else torch.linalg.vector_norm(each, dim=1)
        found: Tensor = each.view(self.n, self.images).sum(1) * math.sqrt(self.shape[2:].numel())
        return found

    def sq_error(self) -> Tensor | None:
        """Some units of the sizes of all positions' terms: torch adds them one after the other."""
        count = self.images * self._positions()
        unit = error_units(count, count) * torch.finfo(real(self.dtype)).eps
        return (unit * self._sizes()).square_()

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """One ordinary weight gradient with the smaller factor scaled."""
        dtype, g = wide(self.dtype), self.geometry
        copies = self._copies(min(self.x.numel(), self.grad.numel()))
        if self.n == 0 or (self.n > 1 and copies > scratch()):
            total = torch.zeros(self.shape, dtype=dtype, device=self.device)
            for first, last in spans(self.n, copies // max(self.n, 1)):
                total += self.narrowed(first, last).weighted_sum(c[first:last])
            return total
        x, grad = self.x.to(dtype), self.grad.to(dtype)
        scale = c.to(dtype).repeat_interleave(self.images).view(-1, *[1] * (x.dim() - 1))
        if x.numel() < grad.numel():
            x = x * scale
        else:
            grad = grad * scale
        found: Tensor = torch.ops.aten.convolution_backward(
            grad, x, self.weight.to(dtype), None, g.stride, g.padding, g.dilation,
            g.transposed, g.output_padding, g.groups, [False, True, False],
        )[1]  # fmt: skip
        return found

    def dot(self, direction: Tensor) -> Tensor:
        """⟨conv(x, V), g⟩ image by image."""
        if self.dtype.is_complex or self.n == 0:
            return super().dot(direction)
        copies = self._copies(self.grad.numel())
        if self.n > 1 and copies > scratch():
            runs = spans(self.n, copies // self.n)
            return torch.cat([self.narrowed(*run).dot(direction) for run in runs])
        return self.dots_of_pixels(direction).view(self.n, -1).sum(1)

    def dots_of_pixels(self, direction: Tensor) -> Tensor:
        """The same for every image and pixel of the output."""
        dtype, g = wide(self.dtype), self.geometry
        moved: Tensor = torch.ops.aten.convolution(
            self.x.to(dtype), direction.to(dtype), None, g.stride, g.padding, g.dilation,
            g.transposed, g.output_padding, g.groups,
        )  # fmt: skip
        return (moved * self.grad.to(dtype)).sum(1)

    def _copies(self, elements: int) -> int:
        """Scratch memory for two tensors of so many elements, and for widened factors."""
        width = wide(self.dtype).itemsize
        widened = (self.x.numel() + self.grad.numel()) * width if self.dtype.itemsize < width else 0
        return 2 * elements * width + widened

    def project(self, sketch: Sketch) -> Tensor:
        """Σₚ (Sₐ gₚ)(S_b xₚ)ᵀ: sketching all patches is a convolution with kernel S_b."""
        g = self.geometry
        if g.transposed or g.groups != 1 or self.dtype.is_complex or self.n == 0:
            return super().project(sketch)
        dtype, m = wide(self.dtype), self.images
        few, many = sketch.rows.to(dtype), sketch.columns.to(dtype)
        kernel = many.view(-1, *self.shape[1:])
        out = self.grad.new_zeros(self.n, sketch.dim, dtype=dtype)
        positions = self.grad.shape[2:].numel() * m
        for first, last in spans(self.n, positions * (len(few) + len(many)) * dtype.itemsize):
            part = slice(first * m, last * m)
            right = torch.ops.aten.convolution(
                self.x[part].to(dtype), kernel, None,
                g.stride, g.padding, g.dilation, False, g.output_padding, 1,
            )  # fmt: skip
            left = torch.matmul(few, self.grad[part].to(dtype).flatten(2))
            small = torch.matmul(left, right.flatten(2).mT).flatten(1)
            out[first:last] = small.view(last - first, m, -1).sum(1)
        return out


def _one_image(x: Tensor) -> Tensor:
    """All images as the channels of one, in strides that torch does not read as channels-last.

    Its transposed convolutions refuse that of a single pixel.
    """
    return x.reshape(-1).view(1, -1, *x.shape[2:])
