"""What stands between the brackets of ``x[...]``: one entry for every axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def expand_index(index: Any, rank: int) -> list[Any]:
    """The index as one entry per consumed axis (None entries add axes), Ellipsis filled in."""
    entries = list(index) if isinstance(index, tuple) or _stands_for_tuple(index) else [index]
    entries = [torch.as_tensor(e) if isinstance(e, list) else e for e in entries]
    fill = [slice(None)] * (rank - sum(_consumed(entry) for entry in entries))
    for at, entry in enumerate(entries):
        if entry is Ellipsis:
            return entries[:at] + fill + entries[at + 1 :]
    return entries + fill


def _stands_for_tuple(index: Any) -> bool:
    """Whether torch takes a list for a tuple: it holds more than numbers, and is short."""
    return (
        isinstance(index, list)
        and len(index) < 32
        and any(
            e is None
            or e is Ellipsis
            or isinstance(e, (slice, Tensor, Sequence))
            or type(e).__name__ == "ndarray"
            for e in index
        )
    )


def _consumed(entry: Any) -> int:
    """How many axes an entry stands for; masks, for all of theirs."""
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.dim()
    return 0 if entry is None or entry is Ellipsis or isinstance(entry, bool) else 1


def shrink_colours(ids: Tensor, shape: torch.Size, entries: list[Any]) -> Tensor:
    """Colours with axes of one wherever the index takes all of a colourless axis."""
    sizes, axis = list(shape), 0
    for entry in entries:
        if isinstance(entry, slice) and entry == slice(None) and ids.size(axis) == 1:
            sizes[axis] = 1
        axis += _consumed(entry)
    return ids.expand(sizes)
