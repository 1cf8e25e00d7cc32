"""Where the samples of one call are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batch:
    """How many samples, on which axis, how the loss joins them, and how many rows are wanted."""

    size: int
    dim: int
    loss_reduction: str
    rows: int
