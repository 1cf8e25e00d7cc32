"""Compiled code runs as it was written while any recording is open, in any thread.

Inside a compiled graph nothing can be seen. torch's stance is process-wide, so the first recording
that opens takes it and the last that closes gives it back, whatever their order.
"""

from __future__ import annotations

import contextlib
import sys
import threading

import torch

_LOCK = threading.Lock()
_OPEN: list[object] = []
_STANCE = contextlib.ExitStack()


def eagerly(owner: object) -> None:
    """Take the stance; its first use imports the compiler, so only where that has happened."""
    if "torch._dynamo" not in sys.modules:
        return
    with _LOCK:
        if not _OPEN:
            _STANCE.enter_context(torch.compiler.set_stance("force_eager"))
        _OPEN.append(owner)


def as_before(owner: object) -> None:
    """Give it back, if this was the last owner."""
    with _LOCK:
        left = [other for other in _OPEN if other is not owner]
        if _OPEN and not left:
            _STANCE.close()
        _OPEN[:] = left
