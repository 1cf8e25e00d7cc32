"""Tables that are written again: a buffer of ours is cleared only where we wrote."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# The rows that were written to a user's buffer, and the buffer's version and memory then.
_WRITTEN: MutableMapping[Tensor, tuple[Tensor, int, int]] = WeakTensorKeyDictionary()
_LOOKS = 2048  # elements of a reused buffer that are looked at


def rewrite(out: Tensor, table: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """``values`` added up in the rows ``keys`` of ``table``, a view of all of ``out``."""
    before = None if _collectives() else _WRITTEN.get(out)
    ours = before is not None and before[1:] == (out._version, out.data_ptr())
    if before is not None and ours:
        table.index_fill_(0, before[0], 0)
    if not ours or _holds_numbers(table):
        table.zero_()
    table.index_add_(0, keys, values)
    _WRITTEN[out] = (keys, out._version, out.data_ptr())
    return out


def _collectives() -> bool:
    """Whether other processes may write to buffers, which no version shows."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _holds_numbers(table: Tensor) -> bool:
    """Whether a cleared table is not zero: NumPy, ``.data`` or DLPack wrote all over it."""
    flat = table.view(-1)
    return bool(flat[:: max(1, flat.numel() // _LOOKS)].any())
