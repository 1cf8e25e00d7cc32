"""Forms of one tensor that are linear maps of a form of another."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from .form import Form


class Mapped(Form):
    """gᵢ = L hᵢ for a linear map L, the same for every sample; ``form`` holds all hᵢ."""

    __slots__ = ("form",)

    def __init__(
        self, form: Form, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(form.n, shape, dtype, device)
        self.form = form

    def of(self, form: Form) -> Mapped:
        """The same map of another form."""
        raise NotImplementedError

    def map(self) -> Hashable:
        """What identifies the map: sums of forms with the same one are mapped once."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """What the inner form is made of."""
        return self.form.tensors()

    def owns(self, rows: Tensor) -> bool:
        """Some maps are views: a clone's derivative hands its seed on."""
        return self.form.owns(rows)

    def nbytes(self) -> int:
        """Bytes of the inner form."""
        return self.form.nbytes()

    def work(self) -> int:
        """That of the inner form."""
        return self.form.work()

    def without(self, bad: Tensor) -> Mapped:
        """Zero gradients for some samples."""
        return self.of(self.form.without(bad))

    def narrowed(self, first: int, last: int) -> Mapped:
        """Some samples of the inner form."""
        return self.of(self.form.narrowed(first, last))
