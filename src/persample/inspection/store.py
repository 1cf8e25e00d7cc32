"""Rows that grow with the data set: in memory while they are few, in files beyond a limit."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..errors import StorageError, UsageError


class Scratch:
    """A directory for what does not fit in memory; made when needed, removed with its owner."""

    def __init__(self, parent: str | None = None, limit: int = 64 << 20) -> None:
        self.parent, self.limit = parent, limit
        self._path: Path | None = None
        self._count = 0

    def new_file(self) -> Path:
        """A path nobody uses."""
        if self._path is None:
            try:
                self._path = Path(tempfile.mkdtemp(prefix="persample-", dir=self.parent))
            except OSError as error:
                raise _failed(self.parent or tempfile.gettempdir(), error) from error
            weakref.finalize(self, shutil.rmtree, self._path, True)
        self._count += 1
        return self._path / f"{self._count}.rows"


class Rows:
    """A tensor (rows, *tail) that is appended to.

    Files are written with ``write``, never through a memory map: a full disk then raises here, and
    does not kill the process.
    """

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self.count = 0
        self._parts: list[Tensor] = []
        self._bytes = 0
        self._file: BinaryIO | None = None
        self._path: Path | None = None
        self._tail: tuple[int, ...] | None = None
        self._dtype = torch.float32
        self._whole: Tensor | None = None

    def __len__(self) -> int:
        return self.count

    @property
    def on_disk(self) -> bool:
        """Whether the rows lie in a file."""
        return self._path is not None

    def append(self, rows: Tensor) -> None:
        """Add rows (n, *tail); dtype and tail are those of the first call."""
        rows = rows.detach().to("cpu").contiguous()
        if self._tail is None:
            self._tail, self._dtype = tuple(rows.shape[1:]), rows.dtype
        if tuple(rows.shape[1:]) != self._tail:
            raise UsageError(
                f"a batch gives rows of shape {tuple(rows.shape[1:])}, earlier ones {self._tail}",
                fix="let every batch give the same shape per sample",
            )
        rows = rows.to(self._dtype)
        size = rows.numel() * rows.element_size()
        if self._file is None and self._bytes + size > self.scratch.limit:
            self._spill()
        self._bytes += size
        if self._file is None:
            self._parts.append(rows.clone())
        else:
            self._write(rows)
        self._whole = None
        self.count += rows.shape[0]  # last: an interrupted append does not count

    def tensor(self) -> Tensor:
        """All rows; a memory map if they are in a file."""
        if self._whole is None:
            tail = self._tail or ()
            if self._file is not None:
                self._file.flush()
                count = self.count * torch.Size(tail).numel()
                flat = torch.from_file(str(self._path), False, count, dtype=self._dtype)
                return flat.view(self.count, *tail)
            if not self._parts:
                return torch.zeros(0, *tail, dtype=self._dtype)
            self._whole = torch.cat(self._parts)
            self._parts = [self._whole]
        return self._whole

    def _spill(self) -> None:
        self._path = self.scratch.new_file()
        try:
            self._file = open(self._path, "wb")  # noqa: SIM115
        except OSError as error:
            raise _failed(str(self._path), error) from error
        weakref.finalize(self, self._file.close)
        for part in self._parts:
            self._write(part)
        self._parts.clear()

    def _write(self, rows: Tensor) -> None:
        assert self._file is not None
        try:
            if rows.numel():
                self._file.write(memoryview(_bytes(rows)))
            self._file.flush()
        except OSError as error:
            raise _failed(str(self._path), error) from error


class Ragged:
    """Rows of different lengths: their elements one after the other, and where each ends."""

    def __init__(self, scratch: Scratch) -> None:
        self._flat, self._ends = Rows(scratch), Rows(scratch)
        self._last = 0

    def __len__(self) -> int:
        return len(self._ends)

    def append(self, flat: Tensor, sizes: Sequence[int]) -> None:
        """Add rows of these sizes, one after the other in one dimension."""
        if not sizes:
            return
        self._flat.append(flat)
        self._ends.append(torch.tensor(sizes).cumsum(0) + self._last)
        self._last += sum(sizes)

    def __getitem__(self, index: int) -> Tensor:
        ends = self._ends.tensor()
        first = int(ends[index - 1]) if index else 0
        return self._flat.tensor()[first : int(ends[index])]


class Texts:
    """Strings, kept as UTF-8."""

    def __init__(self, scratch: Scratch) -> None:
        self._bytes = Ragged(scratch)

    def __len__(self) -> int:
        return len(self._bytes)

    def append(self, texts: Sequence[str]) -> None:
        """Add strings."""
        each = [text.encode() for text in texts]
        joined = torch.tensor(list(b"".join(each)), dtype=torch.uint8)
        self._bytes.append(joined, [len(text) for text in each])

    def __getitem__(self, index: int) -> str:
        return bytes(self._bytes[index].tolist()).decode()


def _bytes(rows: Tensor) -> bytes:
    flat = rows.contiguous().view(torch.uint8).flatten() if rows.dtype != torch.uint8 else rows
    try:
        return bytes(flat.numpy())
    except RuntimeError:  # torch without numpy
        return bytes(flat.untyped_storage().tolist())[: flat.numel()]


def _failed(path: str, error: OSError) -> StorageError:
    return StorageError(
        f"what the inspection found cannot be kept: {error.strerror or error}",
        where=path,
        why="rows beyond the memory limit are written to a temporary directory",
        fix="free some space, pass scratch= a directory with room, or limit the number of batches",
    )
