"""Tensors that were counted inside the block, from no data at all: positions, steps, grids.

`torch.arange(length)`, and what is computed from such tensors alone. They are the same for all
samples, whatever their size.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from .marks import version


class Positions:
    """Those of one recording that are alive, and as they were made."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """These are made of positions."""
        for tensor in tensors:
            self._known[id(tensor)] = weakref.ref(tensor), version(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of positions, and nothing else was written to it."""
        made, before = self._known.get(id(tensor), (None, 0))
        return made is not None and made() is tensor and version(tensor) == before

    def clear(self) -> None:
        """Forget them."""
        self._known.clear()
