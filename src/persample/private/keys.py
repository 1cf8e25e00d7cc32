"""Secrets, and the numbers that follow from them: a function of (secret, purpose, numbers).

SHAKE-256 is the stream: what it says at one place depends on the key and on that place alone, so
that a longer or shorter stream moves nobody's numbers, and one stream tells nothing of another.
Where very many numbers are drawn, it is the key of a stream of AES-256, which is faster.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError

BYTES = 32
_BLOCK = 16  # bytes of AES


def fresh() -> bytes:
    """A secret of the operating system's."""
    return secrets.token_bytes(BYTES)


def from_generator(generator: Any, what: str) -> bytes:
    """A secret that a generator decides: for tests, since whoever knows its seed knows the secret.

    torch's global generators are refused: models draw from them, and programs seed them.
    """
    if not isinstance(generator, torch.Generator):
        raise UsageError(
            f"{what} takes a torch.Generator, got {type(generator).__name__}",
            fix="leave it out: the secret then comes from the operating system",
        )
    if generator is torch.default_generator or any(
        generator is known for known in getattr(torch.cuda, "default_generators", ())
    ):
        raise UsageError(
            f"{what} is torch's global generator",
            why="torch.manual_seed would decide the random numbers of the guarantee",
            fix="leave it out: the secret then comes from the operating system",
        )
    made = torch.randint(256, (BYTES,), generator=generator, device=generator.device)
    return bytes(made.tolist())


def stream(secret: bytes, purpose: str, *numbers: int, count: int) -> Tensor:
    """``count`` uniform 64-bit integers (signed), of this secret, purpose and numbers alone."""
    found = _digest(secret, purpose, numbers, 8 * count)
    return torch.frombuffer(found, dtype=torch.int64) if count else torch.zeros(0).long()


def seed(secret: bytes, purpose: str, *numbers: int) -> int:
    """One seed of 63 bits for a generator."""
    return int.from_bytes(_digest(secret, purpose, numbers, 8), "little") >> 1


class Bits:
    """Uniform integers, one after the other, of this secret, purpose and numbers alone."""

    def __init__(self, secret: bytes, purpose: str, *numbers: int) -> None:
        self._stream = _cipher(bytes(_digest(secret, purpose, numbers, BYTES)))
        self._zeros, self._made = b"", bytearray()

    def draw(self, count: int, dtype: torch.dtype) -> Tensor:
        """The next ``count`` of them, signed, in memory that is written to again."""
        size = count * dtype.itemsize
        if size > len(self._zeros):
            # the stream asks for the room of one more block
            self._zeros, self._made = bytes(size), bytearray(size + _BLOCK)
        self._stream.update_into(memoryview(self._zeros)[:size], self._made)
        return torch.frombuffer(self._made, dtype=dtype, count=count)


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ModuleNotFoundError:
        raise UsageError(
            "private training needs cryptography, which is not installed",
            why="its stream of AES is where the noise comes from",
            fix="pip install persample[private]",
        ) from None
    return Cipher(algorithms.AES(key), modes.CTR(bytes(_BLOCK))).encryptor()


def _digest(secret: bytes, purpose: str, numbers: tuple[int, ...], size: int) -> bytearray:
    name = purpose.encode()
    key = b"".join(
        [
            len(secret).to_bytes(4, "little"), secret,
            len(name).to_bytes(4, "little"), name,
            *(number.to_bytes(8, "little", signed=True) for number in numbers),
        ]
    )  # fmt: skip
    return bytearray(hashlib.shake_256(key).digest(size))
