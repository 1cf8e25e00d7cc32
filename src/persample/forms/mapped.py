"""Forms made of other forms: linear maps of one, and what several of them add up to."""

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
