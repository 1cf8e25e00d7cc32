"""What every measuring process needs: a memory limit, a settled heap, short messages."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path


def settle() -> None:
    """Free what nobody holds and give it back to the system."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def limit() -> None:
    """Let an allocation beyond most of the free memory fail instead of the machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            size = int(line.split()[1]) * 1024 * 8 // 10
            resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def message(error: BaseException) -> str:
    """The first line of an error, with its kind, short enough for a table."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}".strip(": ")
    return text if len(text) <= 160 else text[:157] + "..."
