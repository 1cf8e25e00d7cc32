"""What every measuring process needs: arguments, a memory limit, a settled heap, short messages."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def run(name: str, text: str | None, measure: Callable[[bool], Any]) -> None:
    """The command line of a part that measures without peers: ``measure(quick)``, and write."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.measure.{name}", description=text)
    parser.add_argument("result", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.result.write_text(json.dumps(measure(given.quick)))


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
