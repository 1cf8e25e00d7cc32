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

_BLOCK = 1 << 18  # numbers drawn at a time: they stay in the cache
_INTEGERS = {torch.float64: torch.int64}  # as many bits as the numbers have


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
        source = Normal(self.secret, step, count_numbers(sums))
        for total in sums.values():
            source.add_to(total, self.std, divisor)

    def _advance(self, step: int, sums: Mapping[str, Tensor]) -> None:
        """The noise of the next step; nothing changes unless all of it could be made."""
        source, past = Normal(self.secret, step, count_numbers(sums)), {}
        for name, total in sums.items():
            white, before = torch.zeros_like(total), self.past.get(name, [])
            source.add_to(white, self.std)
            drawn = banded.correlated(white, before, bands=self.bands)
            past[name] = [drawn, *before[: self.bands - 2]]
        self.past, self.last = past, step


class Normal:
    """Normal numbers that a secret and a step decide, for one tensor after the other.

    They are drawn in blocks, whatever the sizes of the tensors: small ones take parts of one.
    ``size`` is how many numbers will be asked for.
    """

    def __init__(self, secret: bytes, step: int, size: int) -> None:
        self._secret, self._step = secret, step
        self._bits, self._half = Bits(secret, "noise", step), (min(max(size, 1), _BLOCK) + 1) // 2
        self._memory: dict[torch.dtype, Tensor] = {}
        self._left: dict[torch.dtype, Tensor] = {}
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
        while len(flat):
            block = self._next(flat.dtype)
            count = min(len(flat), len(block))
            flat[:count].add_(block[:count], alpha=std).div_(divisor)
            flat, self._left[flat.dtype] = flat[count:], block[count:]

    def _next(self, dtype: torch.dtype) -> Tensor:
        """Numbers that were not used yet: what is left of a block, or another one."""
        left = self._left.get(dtype)
        return self._draw(dtype) if left is None or not len(left) else left

    def _draw(self, dtype: torch.dtype) -> Tensor:
        """Another block, by Box and Muller; it is written over the last one."""
        if dtype not in self._memory:
            self._memory[dtype] = torch.empty(3, self._half, dtype=dtype)
        memory = self._memory[dtype]
        bits = self._bits.draw(2 * self._half, _INTEGERS.get(dtype, torch.int32))
        radius, angle = polar(bits.view(2, -1), memory[1:])
        torch.cos(angle, out=memory[0])
        angle.sin_()
        return memory[:2].mul_(radius).view(-1)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            number = len(self._generators)  # no two devices draw the same numbers
            key = seed(self._secret, "noise", self._step, number)
            self._generators[device] = torch.Generator(device).manual_seed(key)
        return self._generators[device]


def polar(bits: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Radii and angles of pairs of normal numbers, from two rows of uniform signed integers.

    The uniform number behind a radius is an integer's size, so that it is finest near zero, where
    the largest radii are: they reach 6.6 (9.4 in double precision). Angles are in the first row
    of ``out``.
    """
    unit = 2.0 ** (1 - torch.iinfo(bits.dtype).bits)
    angle, radius = out
    radius.copy_(bits[0]).abs_().mul_(unit).clamp_(min=unit / 2).log_().mul_(-2).sqrt_()
    return radius, angle.copy_(bits[1]).mul_(math.pi * unit)


def count_numbers(sums: Mapping[str, Tensor]) -> int:
    """How many real numbers the sums have: a complex one counts as two."""
    return sum(total.numel() * (1 + total.is_complex()) for total in sums.values())
