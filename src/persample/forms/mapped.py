"""Forms made of other forms: linear maps of one, sums of several, one without some samples.

A linear map may be a piece, or a rearrangement, of a parameter: slices, transposes, views.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from .cost import Plan
from .form import Form, Moments, real
from .rounding import Norms


class Composite(Form):
    """n gradients that are computed from those of several forms."""

    __slots__ = ("forms",)

    def __init__(
        self, forms: Sequence[Form], n: int, shape: torch.Size, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(n, shape, dtype, device)
        self.forms = list(forms)

    def tensors(self) -> list[Tensor]:
        """What the forms are made of."""
        return [t for form in self.forms for t in form.tensors()]

    def owns(self, rows: Tensor) -> bool:
        """Rows may be one form's own."""
        return any(form.owns(rows) for form in self.forms)

    def nbytes(self) -> int:
        """Bytes of all forms."""
        return sum(form.nbytes() for form in self.forms)

    def work(self) -> int:
        """That of all forms."""
        return sum(form.work() for form in self.forms)


class Mapped(Composite):
    """gᵢ = L hᵢ for a linear map L, the same for every sample; ``form`` holds all hᵢ.

    Some maps are views: a clone's derivative hands its seed on.
    """

    __slots__ = ("form",)

    def __init__(
        self, form: Form, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__([form], form.n, shape, dtype, device)
        self.form = form

    def of(self, form: Form) -> Mapped:
        """The same map of another form."""
        raise NotImplementedError

    def map(self) -> Hashable:
        """What identifies the map: sums of forms with the same one are mapped once."""
        raise NotImplementedError

    def without(self, bad: Tensor) -> Mapped:
        """Zero gradients for some samples."""
        return self.of(self.form.without(bad))

    def narrowed(self, first: int, last: int) -> Mapped:
        """Some samples of the inner form."""
        return self.of(self.form.narrowed(first, last))


class Masked(Composite):
    """Zero for ``bad`` samples; the others' rows are computed as they are with them.

    What is computed in another way is rounded in another way, and norms come from these very rows.
    """

    __slots__ = ("bad", "form")

    def __init__(self, form: Form, bad: Tensor) -> None:
        super().__init__([form], form.n, form.shape, form.dtype, form.device)
        self.form, self.bad = form, bad

    def row_bytes(self) -> int:
        """As before, so that as many rows are computed at a time."""
        return self.form.row_bytes()

    def without(self, bad: Tensor) -> Masked:
        """Zero for more samples."""
        return Masked(self.form, self.bad | bad)

    def narrowed(self, first: int, last: int) -> Masked:
        """Some of the samples."""
        return Masked(self.form.narrowed(first, last), self.bad[first:last])

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """The form's wide rows, some of them zero."""
        bad = self.bad[first:last].view(-1, *[1] * len(self.shape))
        return self.form.wide_dense(first, last).masked_fill(bad, 0)


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

    def region(self, out: Tensor) -> Tensor:
        """The view's places in a contiguous tensor of the parameter's shape, or in rows of such."""
        lead = out.shape[: out.dim() - len(self.shape)]
        strides = (self.size, *self.strides) if lead else self.strides
        return out.as_strided((*lead, *self.view), strides, out.storage_offset() + self.offset)

    def add_to(self, out: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """To their places alone."""
        if not out.is_contiguous():
            return super().add_to(out, first, last)
        self.region(out).add_(self.form.wide_dense(first, last))
        return out

    def plan(self) -> Plan:
        """That of the view."""
        return self.form.plan()

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Zeros with the view's wide rows in their places."""
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

    def add_sum(self, out: Tensor, c: Tensor, *, certain: bool = False) -> Tensor:
        """To its place alone."""
        self.region(out).add_(self.form.weighted_sum(c, certain=certain))
        return out

    def _place(self, value: Tensor) -> Tensor:
        """Zeros with a value of the view, or rows of such, in its place."""
        out = value.new_zeros((*value.shape[: value.dim() - len(self.view)], *self.shape))
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
