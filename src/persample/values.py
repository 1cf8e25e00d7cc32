"""Whether parameters still are what they were in backward.

Version counters tell of most writes, but not of those of fused optimizers, through ``.data``, or by
NumPy. Some elements of every parameter are kept: a step changes them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .conditions import equal
from .parameters import Slot

_LOOKS = 64  # elements of each parameter that are kept


class Values:
    """Some elements of every parameter that can be trained, as they were."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._kept = [
            (slot, _some(slot.tensor)) for slot in slots if slot.tensor.layout is torch.strided
        ]

    def changed(self) -> Slot | None:
        """A parameter that is not what it was."""
        for slot, before in self._kept:
            now = _some(slot.tensor)
            if now.dtype != before.dtype or now.shape != before.shape or not equal(now, before):
                return slot
        return None


def _some(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _LOOKS)].clone()
