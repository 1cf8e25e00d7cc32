"""One gradient for every position: gᵢ = Σₜ gᵢₜ, and ⟨gᵢₜ, gᵢ⟩ of each, its share of ‖gᵢ‖².

The pieces are a form of n · T gradients, row i · T + t. Cross terms are in it: shares of one sample
add up to ‖gᵢ‖² whatever the pieces cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cost import Plan, cheapest, spans
from .dense import Dense
from .form import Form, real, wide
from .mapped import Composite
from .outer import Outer
from .patches import Patches
from .table_rows import Rows


class Pixels(Composite):
    """gᵢₜ is the weight gradient of image i whose output gradient is kept at position t alone.

    Row i · positions + t; positions are the output's pixels in row-major order.
    """

    __slots__ = ("patches", "positions")

    def __init__(self, patches: Patches) -> None:
        self.patches, self.positions = patches, patches.grad.shape[2:].numel()
        count = patches.n * self.positions
        super().__init__([patches], count, patches.shape, patches.dtype, patches.device)

    def narrowed(self, first: int, last: int) -> Form:
        """Some of the rows, written out unless they are of whole images."""
        (low, start), (high, stop) = (divmod(at, self.positions) for at in (first, last))
        if start or stop:
            return Dense(self.wide_dense(first, last))
        return Pixels(self.patches.narrowed(low, high))

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Each row from a copy of its image."""
        rows = torch.arange(first, self.n if last is None else last, device=self.device)
        image, at, p = rows // self.positions, rows % self.positions, self.patches
        others = torch.arange(self.positions, device=self.device) != at.unsqueeze(1)
        grad = p.grad[image].masked_fill_(others.view(-1, 1, *p.grad.shape[2:]), 0)
        return Patches(p.x[image], grad, p.weight, p.geometry).wide_dense()

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """One weight gradient with scaled pixels."""
        p, dtype = self.patches, wide(self.dtype)
        grad = p.grad.to(dtype) * c.to(dtype).view(p.n, 1, *p.grad.shape[2:])
        whole = Patches(p.x, grad, p.weight, p.geometry)
        return whole.weighted_sum(torch.ones(p.n, dtype=dtype, device=self.device))

    def dot(self, direction: Tensor) -> Tensor:
        """⟨conv(x, V), g⟩ pixel by pixel."""
        if self.dtype.is_complex or self.patches.n == 0:
            return super().dot(direction)
        return self.patches.dots_of_pixels(direction).flatten()


def shares(form: Form, n: int) -> Tensor:
    """⟨gᵢₜ, gᵢ⟩: (n, T)."""
    if not form.dtype.is_complex:
        if isinstance(form, Dense):
            return _dense(form, n)
        if isinstance(form, Outer):
            return _outer(form, n)
        if isinstance(form, Rows):
            return _rows(form, n)
    return _shares_from_rows(form, n)


def _dense(form: Dense, n: int) -> Tensor:
    pieces = form.values.reshape(n, form.n // n, form.size)
    out = pieces.new_zeros(pieces.shape[:2], dtype=real(form.dtype))
    for first, last in spans(n, 2 * pieces[0].numel() * wide(form.dtype).itemsize):
        part = pieces[first:last].to(out.dtype)
        out[first:last] = torch.matmul(part, part.sum(1).unsqueeze(2)).squeeze(2)
    return out


def _by_sample(form: Outer, n: int) -> tuple[Tensor, Tensor]:
    """Factors (n, k, T · u, a) and (n, k, T · u, b): pieces of a sample are its positions."""
    left, right = (
        f.unflatten(0, (n, form.n // n)).transpose(1, 2).flatten(2, 3)
        for f in (form.left, form.right)
    )
    return left, right


def _outer(form: Outer, n: int) -> Tensor:
    """By products of positions, or by the sample's matrix, whichever is cheaper."""
    dtype = wide(form.dtype)
    left, right = _by_sample(form, n)
    k, t, a, b = *left.shape[1:], right.shape[3]
    width = k * dtype.itemsize
    plan = cheapest(
        Plan("gram", n * k * t * t * (a + b), 2 * n * t * t * width, 2 * t * t * width, n),
        Plan("direct", 2 * n * k * t * a * b, n * a * b * width, (a + t) * b * width, n),
    )
    out = torch.zeros(n, t, dtype=real(form.dtype), device=form.device)
    for first, last in spans(n, plan.item):
        mine, other = left[first:last].to(dtype), right[first:last].to(dtype)
        if plan.way == "direct":
            matrix = torch.matmul(mine.mT, other)
            out[first:last] = torch.matmul(mine, matrix).mul_(other).sum((1, 3))
            continue
        for start, stop in spans(t, 2 * t * width * (last - first)):
            products = torch.matmul(mine[:, :, start:stop], mine.mT)
            products *= torch.matmul(other[:, :, start:stop], other.mT)
            out[first:last, start:stop] = products.sum((1, 3))
    return out.view(n, form.n // n, -1).sum(2)


def _rows(form: Rows, n: int) -> Tensor:
    """Each row with the sum of its sample's rows of the same index."""
    pieces = form.n // n
    values = form.values.to(wide(form.dtype))
    keys = torch.div(form.sample, pieces, rounding_mode="floor") * form.shape[0] + form.index
    found, where = torch.unique(keys, return_inverse=True)
    sums = values.new_zeros(found.numel(), values.shape[1]).index_add_(0, where, values)
    each = (values * sums[where]).sum(1)
    return each.new_zeros(form.n).index_add_(0, form.sample, each).view(n, pieces)


def _shares_from_rows(form: Form, n: int) -> Tensor:
    """Any mixture: the sample's own gradient, written out, is the direction of its pieces."""
    pieces = form.n // n
    out = torch.zeros(n, pieces, dtype=real(form.dtype), device=form.device)
    ones = torch.ones(pieces, dtype=out.dtype, device=form.device)
    for i in range(n):
        mine = form.narrowed(i * pieces, (i + 1) * pieces)
        out[i] = mine.dot(mine.weighted_sum(ones))
    return out
