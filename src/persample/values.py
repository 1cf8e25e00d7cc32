"""Whether parameters still are what they were in backward.

Version counters tell of most writes, but not of those of fused optimizers, through ``.data``, or by
NumPy. Some elements of every parameter are kept: a step changes them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .conditions import equal
from .marks import version
from .parameters import Slot

_LOOKS = 64  # elements of each parameter that are kept


class Value:
    """Some elements of a tensor, as they were."""

    __slots__ = ("_some", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version, self._some = tensor, version(tensor), _some(tensor)

    def changed(self) -> bool:
        """Whether it is not what it was; a version may count writes of the same numbers."""
        now, before = _some(self.tensor), self._some
        return now.dtype != before.dtype or now.shape != before.shape or not equal(now, before)

    def untouched(self) -> bool:
        """Whether nobody wrote to it."""
        return version(self.tensor) == self._version and not self.changed()


class Values:
    """Every parameter that can be trained, as it was."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._kept = [
            (slot, Value(slot.tensor)) for slot in slots if slot.tensor.layout is torch.strided
        ]

    def changed(self) -> Slot | None:
        """A parameter that is not what it was."""
        return next((slot for slot, value in self._kept if value.changed()), None)


def _some(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _LOOKS)].clone()
