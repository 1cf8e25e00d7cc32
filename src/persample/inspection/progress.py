"""A progress bar with the time that is left, on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 28


class Progress:
    """One line that is rewritten; nothing at all where the stream is not a terminal."""

    def __init__(
        self, total: int | None, *, shown: bool | None = None, stream: TextIO | None = None
    ) -> None:
        self.total, self.stream = total, stream or sys.stderr
        self.shown = self.stream.isatty() if shown is None else shown
        self._start = self._last = time.monotonic()
        self._width = 0

    def update(self, batches: int, samples: int) -> None:
        """Rewrite the line, ten times a second at most."""
        now = time.monotonic()
        if not self.shown or (now - self._last < 0.1 and batches != self.total):
            return
        self._last = now
        self._write(self.line(batches, samples, now - self._start))

    def line(self, batches: int, samples: int, seconds: float) -> str:
        """``inspecting [=====     ]  43 %  768 samples  0:03 left``."""
        if not self.total:
            return f"inspecting  {batches:,} batches  {samples:,} samples  {clock(seconds)}"
        part = min(batches / self.total, 1.0)
        bar = "=" * round(part * WIDTH)
        left = clock(seconds / batches * (self.total - batches)) if batches else "?"
        return f"inspecting [{bar:{WIDTH}}] {part:4.0%}  {samples:,} samples  {left} left"

    def close(self) -> None:
        """Take the line away."""
        if self.shown and self._width:
            self.stream.write("\r" + " " * self._width + "\r")
            self.stream.flush()
            self._width = 0

    def _write(self, text: str) -> None:
        self.stream.write("\r" + text.ljust(self._width))
        self.stream.flush()
        self._width = len(text)


def clock(seconds: float) -> str:
    """``1:05`` or ``2:01:05``."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
