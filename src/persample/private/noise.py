"""Gaussian noise: once a step for every parameter, a function of (secret, step)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import banded
from .keys import seed, words

_HEAD, _WORDS, _BYTES = 24, 624, 5056  # of the state of torch's Mersenne Twister
_PIECE = 1 << 16


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
        self._generators: dict[torch.device, torch.Generator] = {}
        self._scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._count = 0

    def add_to(self, total: Tensor, std: float, divisor: float = 1.0) -> None:
        """Add the next numbers, of this standard deviation, and divide, in place.

        A complex number has two coordinates, and each of them gets the noise of one.
        """
        real = torch.view_as_real(total) if total.is_complex() else total
        flat = real.view(-1)
        # on the CPU in pieces that stay in its cache: fresh memory costs as much as the numbers
        size = _PIECE if flat.device.type == "cpu" else max(1, len(flat))
        for piece in flat.split(size):
            piece.add_(self._next(piece), alpha=std).div_(divisor)

    def _next(self, like: Tensor) -> Tensor:
        device, dtype = like.device, like.dtype
        self._count += 1
        if device.type == "cpu" and not layout_is_known():
            count = len(like) + len(like) % 2
            drawn = words(self._secret, "words", self._step, self._count, count=count)
            return from_words(drawn, dtype)[: len(like)]
        if device not in self._generators:
            number = len(self._generators)  # no two devices draw the same numbers
            self._generators[device] = keyed(self._secret, self._step, number, device=device)
        scratch = self._scratch.get((device, dtype))
        if scratch is None or len(scratch) < len(like):
            scratch = self._scratch[device, dtype] = torch.empty_like(like)
        return scratch[: len(like)].normal_(generator=self._generators[device])


def keyed(secret: bytes, step: int, number: int, *, device: torch.device) -> torch.Generator:
    """A generator with a state of its own for each key.

    On the CPU ``manual_seed`` takes 32 bits of its seed, which could all be tried. So the secret
    decides the whole state (https://github.com/pytorch/pytorch/issues/87509).
    """
    generator = torch.Generator(device)
    if device.type != "cpu":
        return generator.manual_seed(seed(secret, "noise", step, number))
    state = generator.manual_seed(0).get_state()
    found = words(secret, "noise", step, number, count=_WORDS).to(torch.int64) & 0xFFFFFFFF
    state[_HEAD : _HEAD + 8 * _WORDS] = found.view(torch.uint8)
    generator.set_state(state)
    return generator


@functools.cache
def layout_is_known() -> bool:
    """Whether the state of torch's CPU generator holds its words where they always were."""
    state = torch.Generator("cpu").manual_seed(5489).get_state()
    if len(state) != _BYTES:
        return False
    found = state[_HEAD : _HEAD + 8 * _WORDS].clone().view(torch.int64).tolist()
    value, expected = 5489, [5489]
    for k in range(1, _WORDS):
        value = (1812433253 * (value ^ (value >> 30)) + k) & 0xFFFFFFFF
        expected.append(value)
    return bool(found == expected)


def from_words(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Normal numbers from an even number of 32-bit integers, by Box and Muller."""
    first, second = numbers.double().view(2, -1)
    size = first.mul(2.0**-32).add_(0.5 + 2.0**-33).log_().mul_(-2).sqrt_()
    angle = second.mul(math.pi * 2.0**-31)
    return torch.cat([size * angle.cos(), size * angle.sin()]).to(dtype)
