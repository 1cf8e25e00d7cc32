"""Poisson sampling: an independent coin for every index in every step."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from . import banded
from .keys import stream

_HALF = 1 << 63


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Which of ``size`` records are in the batch of a step: each with probability ``rate``.

    The coin of record i in step t is a function of (secret, t, i) alone: a record that is removed
    keeps its index, and moves nobody's coin. The rate is rounded down to a multiple of 2⁻⁶⁴.

    Attributes:
        secret: The key of all coins. Whoever knows it knows who was in which batch.
        size: The public number of records.
        rate: The probability of being drawn.
        cap: The largest batch: a larger one is cut down to a uniform subset.
        bands: With b > 1, an independent coin puts every record into one of b groups, and step t
            draws from group t mod b alone, with b times the rate.
    """

    secret: bytes
    size: int
    rate: float
    cap: int | None = None
    bands: int = 1

    def drawn(self, step: int) -> Tensor:
        """The indices of a step's batch, in ascending order; there may be none."""
        coins = stream(self.secret, "coins", step, count=self.size)
        most = int(Fraction(self.rate) * self.bands * (1 << 64))
        if most >= 1 << 64:
            within = torch.ones(self.size, dtype=torch.bool, device="cpu")
        else:
            within = coins < most - _HALF
        if self.bands > 1:
            within &= self._groups == banded.group(step, bands=self.bands)
        found = within.nonzero().flatten()
        if self.cap is None or len(found) <= self.cap:
            return found
        # given that they are below the limit, coins are still independent and uniform: the
        # smallest of them are a uniform subset
        return found[coins[found].argsort()[: self.cap]].sort().values

    @cached_property
    def _groups(self) -> Tensor:
        return stream(self.secret, "groups", count=self.size).remainder(self.bands)
