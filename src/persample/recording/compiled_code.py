"""Compiled code runs as it was written while any recording is open, in any thread.

Inside a compiled graph nothing can be seen. torch's stance is process-wide, so the first recording
that opens takes it and the last that closes gives it back, whatever their order.

A function under ``torch.jit.script`` keeps the Python function it was made of, which torch.compile
runs in its place, too. Where a recording watches, that is run; everywhere else it stays itself.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any, Protocol

import torch
from torch.jit._state import _jit_caching_layer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_LOCK = threading.Lock()
_OPEN: list[Owner] = []
_STANCE = contextlib.ExitStack()
_FORCED: list[bool] = []  # not empty while the stance is taken
_SCRIPTED: Any = torch._C.ScriptFunction
_BEFORE: list[Any] = []  # how scripted functions are called where nothing watches: others patch it


class Owner(Protocol):
    """A recording."""

    @property
    def mode(self) -> TorchFunctionMode:
        """What watches."""


def eagerly(owner: Owner) -> None:
    """Take the stance; its first use imports the compiler, so only where that has happened."""
    with _LOCK:
        if not _OPEN:
            _BEFORE[:] = [_SCRIPTED.__dict__["__call__"]]
            _SCRIPTED.__call__ = _as_written
        if "torch._dynamo" in sys.modules and not _FORCED:
            _STANCE.enter_context(torch.compiler.set_stance("force_eager"))
            _FORCED.append(True)
        _OPEN.append(owner)


def as_before(owner: Owner) -> None:
    """Give it back, if this was the last owner."""
    with _LOCK:
        left = [other for other in _OPEN if other is not owner]
        if _OPEN and not left:
            _SCRIPTED.__call__ = _BEFORE[0]
            if _FORCED:
                _STANCE.close()
                _FORCED.clear()
        _OPEN[:] = left


def _as_written(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a scripted function, or what it was made of where a recording of this thread watches."""
    original = getattr(function, "_torchdynamo_inline", None)
    if original is None or not _made_of(function, original) or not _watched():
        return _BEFORE[0].__get__(function)(*args, **kwargs)
    names = [argument.name for argument in function.schema.arguments]
    floats = {a.name for a in function.schema.arguments if str(a.type) == "float"}
    given = [float(v) if name in floats else v for name, v in zip(names, args, strict=False)]
    more = {name: float(v) if name in floats else v for name, v in kwargs.items()}
    return original(*given, *args[len(given) :], **more)


def _made_of(function: Any, original: Any) -> bool:
    """Whether it was scripted: what was traced does not do all that the function does."""
    return bool(_jit_caching_layer.get(original) == function.qualified_name)


def _watched() -> bool:
    modes = _get_current_function_mode_stack()
    return any(owner.mode is mode for owner in _OPEN for mode in modes)
