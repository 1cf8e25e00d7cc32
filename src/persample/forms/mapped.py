"""Forms made of other forms: linear maps of one, sums of several, one without some samples."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from .form import Form


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

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """The form's rows, some of them zero."""
        return self._clear(self.form.dense(first, last), first, last)

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """The form's wide rows, some of them zero."""
        return self._clear(self.form.wide_dense(first, last), first, last)

    def _clear(self, rows: Tensor, first: int, last: int | None) -> Tensor:
        bad = self.bad[first:last].view(-1, *[1] * len(self.shape))
        return torch.where(bad, torch.zeros((), dtype=rows.dtype, device=rows.device), rows)
