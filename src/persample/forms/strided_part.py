"""A form of a piece, or of a rearrangement, of a parameter: slices, transposes, views."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from .cost import Plan
from .form import Form, Moments, real
from .mapped import Mapped
from .rounding import Norms


class Part(Mapped):
    """gᵢ is zero but for the elements that a strided view of the parameter names.

    ``form`` is the form of the view; ``size``, ``stride`` and ``offset`` say where the view's
    elements are in the contiguous parameter. The view must not name an element twice.
    """

    __slots__ = ("offset", "strides", "view")

    def __init__(
        self, form: Form, shape: torch.Size, strides: tuple[int, ...], offset: int
    ) -> None:
        super().__init__(form, shape, form.dtype, form.device)
        self.view, self.strides, self.offset = form.shape, strides, offset

    def of(self, form: Form) -> Part:
        """The same places for another form."""
        return Part(form, self.shape, self.strides, self.offset)

    def map(self) -> Hashable:
        """Where the view's elements are."""
        return Part, self.view, self.strides, self.offset

    def span(self) -> tuple[int, int]:
        """First element named, and one past the last."""
        last = self.offset + sum(
            (s - 1) * d for s, d in zip(self.view, self.strides, strict=True) if s
        )
        return self.offset, last + 1

    def box(self) -> list[range] | None:
        """The indices named on every axis of the parameter, if the view is a box of it."""
        named = [(d, s) for d, s in zip(self.strides, self.view, strict=True) if s != 1]
        lengths, rest, found = dict(named), self.offset, []
        if len(lengths) < len(named):
            return None
        whole = torch.empty(self.shape, device="meta")
        for size, stride in zip(whole.shape, whole.stride(), strict=True):
            start, rest = divmod(rest, stride)
            length = lengths.pop(stride, 1) if size != 1 else 1
            if start + length > size:
                return None
            found.append(range(start, start + length))
        return None if lengths or rest else found

    def region(self, out: Tensor) -> Tensor:
        """The view's places in a contiguous tensor of the parameter's shape, or in rows of such."""
        lead = out.shape[: out.dim() - len(self.shape)]
        strides = (self.size, *self.strides) if lead else self.strides
        return out.as_strided((*lead, *self.view), strides, out.storage_offset() + self.offset)

    def add_to(self, out: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """To their places alone."""
        if not out.is_contiguous():
            return super().add_to(out, first, last)
        wider = out.dtype != self.dtype
        rows = self.form.wide_dense(first, last) if wider else self.form.dense(first, last)
        self.region(out).add_(rows)
        return out

    def plan(self) -> Plan:
        """That of the view."""
        return self.form.plan()

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Zeros with the view's rows in their places."""
        return self._place(self.form.dense(first, last))

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """From the view's wide rows."""
        return self._place(self.form.wide_dense(first, last))

    def norms(self) -> Norms:
        """Those of the view: no element is named twice."""
        return self.form.norms()

    def sq_error(self) -> Tensor | None:
        """That of the inner form."""
        return self.form.sq_error()

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """The view's sum in its place."""
        return self._place(self.form.weighted_sum(c, certain=certain))

    def _place(self, value: Tensor) -> Tensor:
        """Zeros with a value of the view, or rows of such, in its place."""
        out = value.new_zeros(*value.shape[: value.dim() - len(self.view)], *self.shape)
        self.region(out).copy_(value)
        return out

    def dot(self, direction: Tensor) -> Tensor:
        """With the direction's own view."""
        seen = direction.contiguous().as_strided(self.view, self.strides, self.offset)
        return self.form.dot(seen)

    def dots(self, other: Form) -> Tensor:
        """Two views of the same elements: as the forms of the views."""
        if isinstance(other, Part) and other.map() == self.map():
            return self.form.dots(other.form)
        if isinstance(other, Part) and (
            self.span()[1] <= other.span()[0] or other.span()[1] <= self.span()[0]
        ):
            return torch.zeros(self.n, other.n, dtype=real(self.dtype), device=self.device)
        return super().dots(other)

    def moments(self, dtype: torch.dtype | None = None) -> Moments:
        """The view's in their place."""
        first, second = self.form.moments(dtype)
        return self._place(first), self._place(second)
