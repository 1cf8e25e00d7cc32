"""Truncated Poisson sampling: of a larger draw, a uniform subset of ``cap`` records is kept.

Where a draw is cut, a record that takes part pushes another one out: it changes the sum by up
to 2C instead of C, and its chance is no longer independent of the others'. The accountant's
event mixes the two cases (arXiv 2508.15089), so a cap near the mean costs a lot.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import UsageError


def default_cap(size: int | None, sample_rate: float) -> int:
    """Six standard deviations above the mean number of records, at most all of them."""
    if size is None:
        raise UsageError(
            'cap="auto" is computed from the number of records', fix="give size= beside it"
        )
    mean = size * sample_rate
    return min(size, math.ceil(mean + 6 * math.sqrt(mean * (1 - sample_rate))))


def kept(drawn: Tensor, priorities: Tensor, *, cap: int) -> Tensor:
    """The ``cap`` drawn records of the smallest priorities, in the order in which they came.

    Uniform if priorities are independent and uniform. Keyed by record and step they make the
    choice independent of how the others are numbered.

    >>> import torch
    >>> from persample.private import truncation
    >>> truncation.kept(torch.tensor([3, 5, 9]), torch.tensor([0.7, 0.9, 0.1]), cap=2)
    tensor([3, 9])

    Args:
        drawn: (k,) indices of the records of a Poisson draw.
        priorities: (k,) one number for each.
        cap: The largest number that may stay.
    """
    if drawn.dim() != 1 or priorities.shape != drawn.shape:
        raise UsageError(
            f"{tuple(drawn.shape)} records, but {tuple(priorities.shape)} priorities",
            fix="one priority for each record that was drawn",
        )
    if drawn.numel() <= cap:
        return drawn
    return drawn[torch.topk(priorities, cap, largest=False, sorted=False).indices.sort().values]
