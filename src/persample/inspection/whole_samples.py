"""Small samples kept whole, so that some of them can be run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..inputs.containers import mapped
from .store import Rows, Scratch

LARGEST = 64 << 10  # bytes of a sample that is kept whole


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a tensor with samples belongs in a batch without them."""

    number: int


@dataclass(slots=True)
class Segment:
    """Samples of batches of one structure and shape, and how to make a batch of some of them."""

    empty: Any
    rows: dict[int, Rows]
    indices: Rows

    def batch(self, places: list[int], device: torch.device) -> Any:
        """A batch of some samples; tensors without samples are those of the first batch."""

        def filled(part: Any) -> Any:
            if not isinstance(part, Hole):
                return part
            return self.rows[part.number].tensor()[places].to(device)

        return mapped(self.empty, filled, whole=lambda v: isinstance(v, Hole), objects=True)


class Whole:
    """Small samples kept whole, so that some can be run again."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self.segments: dict[Any, Segment] = {}
        self.missing = ""  # why some are not kept

    def add(self, batch: Any, n: int, first: int) -> None:
        """Keep the samples of a batch whose first one has number ``first``."""
        held: list[Tensor] = []

        def emptied(leaf: Tensor) -> Any:
            if not leaf.dim() or leaf.shape[0] != n:
                return leaf
            held.append(leaf.detach())
            return Hole(len(held) - 1)

        empty = mapped(batch, emptied, objects=True)
        size = sum(leaf.numel() * leaf.element_size() for leaf in held)
        if not held or size > LARGEST * n:
            large = "samples are too large to be kept whole"
            self.missing = large if held else "no tensor of a batch has its samples on axis 0"
            return
        shapes = tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in held)
        segment = self.segments.get(shapes)
        if segment is None:
            rows = {k: Rows(self._scratch) for k in range(len(held))}
            segment = self.segments[shapes] = Segment(empty, rows, Rows(self._scratch))
        for k, leaf in enumerate(held):
            segment.rows[k].append(leaf)
        segment.indices.append(torch.arange(first, first + n))

    def find(self, wanted: set[int]) -> list[tuple[Segment, list[int]]]:
        """Segments with the places in them of some samples."""
        numbers = torch.tensor(sorted(wanted))
        found = []
        for segment in self.segments.values():
            places = torch.isin(segment.indices.tensor(), numbers).nonzero().flatten().tolist()
            if places:
                found.append((segment, places))
        return found
