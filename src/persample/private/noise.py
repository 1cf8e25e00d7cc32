"""Gaussian noise: once a step for every parameter, a function of (secret, step).

On the CPU its bits are a stream of AES-256 in counter mode: whoever sees some of them learns
nothing of the others. Other devices draw from torch's generators, which are not cryptographic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import banded
from .keys import Bits, seed

_PIECE = 1 << 17  # numbers drawn at a time: they stay in the cache


@dataclass(kw_only=True)
class Noise:
    """The noise that is added to a step's sums.

    White noise zₜ of standard deviation ``std``; with b bands, yₜ = zₜ − Σ_{0<k<b} c_k yₜ₋ₖ, where
    the last b − 1 of them are kept.

    Attributes:
        secret: The key. Whoever knows it can subtract the noise.
        std: The standard deviation of the white noise.
        bands: How many steps are correlated.
        draws: How often noise was drawn by this object: once a step.
        past: The noise of the last b − 1 steps by name, newest first.
        last: The step of the newest.
    """

    secret: bytes
    std: float
    bands: int = 1
    draws: int = 0
    past: dict[str, list[Tensor]] = field(default_factory=dict)
    last: int = -1

    def add(self, step: int, sums: Mapping[str, Tensor], divisor: float = 1.0) -> None:
        """Add the noise of a step to the sums of all parameters, and divide, in place."""
        self.draws += 1
        if self.bands > 1:
            while self.last < step:  # a step that was counted but never finished had noise, too
                self._advance(self.last + 1, sums)
            for name, total in sums.items():
                total.add_(self.past[name][0]).div_(divisor)
            return
        source = Normal(self.secret, step)
        for total in sums.values():
            source.add_to(total, self.std, divisor)

    def _advance(self, step: int, sums: Mapping[str, Tensor]) -> None:
        """The noise of the next step; nothing changes unless all of it could be made."""
        source, past = Normal(self.secret, step), {}
        for name, total in sums.items():
            white, before = torch.zeros_like(total), self.past.get(name, [])
            source.add_to(white, self.std)
            drawn = banded.correlated(white, before, bands=self.bands)
            past[name] = [drawn, *before[: self.bands - 2]]
        self.past, self.last = past, step


class Normal:
    """Normal numbers that a secret and a step decide, for one tensor after the other."""

    def __init__(self, secret: bytes, step: int) -> None:
        self._secret, self._step = secret, step
        self._bits = Bits(secret, "noise", step)
        self._generators: dict[torch.device, torch.Generator] = {}

    def add_to(self, total: Tensor, std: float, divisor: float = 1.0) -> None:
        """Add the next numbers, of this standard deviation, and divide, in place.

        A complex number has two coordinates, and each of them gets the noise of one.
        """
        flat = (torch.view_as_real(total) if total.is_complex() else total).view(-1)
        if flat.device.type != "cpu":
            drawn = torch.empty_like(flat).normal_(generator=self._generator(flat.device))
            flat.add_(drawn, alpha=std).div_(divisor)
            return
        for piece in flat.split(_PIECE):
            self._add(piece, std)
            piece.div_(divisor)

    def _add(self, piece: Tensor, std: float) -> None:
        """By Box and Muller: two numbers from two."""
        half = (len(piece) + 1) // 2
        wanted = torch.int64 if piece.dtype == torch.float64 else torch.int32
        first, second = self._bits.draw(2 * half, wanted).view(2, half)
        radius, angle = polar(first, second, piece.dtype)
        one, two = piece[:half], piece[half:]
        one.addcmul_(radius, angle.cos(), value=std)
        two.addcmul_(radius[: len(two)], angle[: len(two)].sin(), value=std)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            number = len(self._generators)  # no two devices draw the same numbers
            key = seed(self._secret, "noise", self._step, number)
            self._generators[device] = torch.Generator(device).manual_seed(key)
        return self._generators[device]


def polar(first: Tensor, second: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Radii and angles of pairs of normal numbers, from uniform signed integers.

    The uniform number behind a radius is an integer's size, so that it is finest near zero, where
    the largest radii are: they reach 6.6 (9.4 in double precision).
    """
    unit = 2.0 ** (1 - torch.iinfo(first.dtype).bits)
    uniform = first.to(dtype).abs_().mul_(unit).clamp_(min=unit / 2)
    return uniform.log_().mul_(-2).sqrt_(), second.to(dtype).mul_(math.pi * unit)
