"""The attribute ``grad_sample``: a row for each sample, added up over uses and backward passes."""

from __future__ import annotations

import torch
from torch import Tensor


def filled_up(rows: Tensor, count: int) -> Tensor:
    """Rows of zeros after those of a smaller batch, which holds the first samples."""
    missing = count - rows.shape[0]
    if missing <= 0:
        return rows
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def accumulate(weight: Tensor, rows: Tensor) -> None:
    """Set ``grad_sample``, or replace it by the sum: what was handed out is not written to."""
    known = getattr(weight, "grad_sample", None)
    weight.grad_sample = rows if known is None else known + rows  # type: ignore[attr-defined]
