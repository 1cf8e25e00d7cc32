"""A plain ``backward()`` inside the block gives parameters no ``.grad``: say so at the step."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..errors import UnheardWarning

_LOCK = threading.Lock()
_WAITING: dict[int, weakref.ref[Tensor]] = {}  # parameters that a plain backward gave nothing
_HOOKED: list[Any] = []


def note_untrained(parameters: Iterable[Tensor]) -> None:
    """A plain backward of a recording reached these, and left no ``.grad``."""
    with _LOCK:
        for parameter in parameters:
            _WAITING[id(parameter)] = weakref.ref(parameter)
        if not _HOOKED:
            _HOOKED.append(register_optimizer_step_pre_hook(_before_step))


def forget_untrained(parameters: Iterable[Tensor]) -> None:
    """Somebody wrote their ``.grad``."""
    if _WAITING:
        with _LOCK:
            for parameter in parameters:
                _WAITING.pop(id(parameter), None)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer steps: parameters without ``.grad`` are passed over, silently."""
    if not _WAITING:
        return
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    waiting = [p for p in mine if _is_waiting(p)]
    forget_untrained(waiting)
    if waiting and all(p.grad is None for p in waiting):
        warnings.warn(
            "this optimizer step trains nothing: the last backward() ran inside a persample.record "
            "block, which leaves no .grad; pass record(model, grad=True), or call "
            "tape.set_grad(...) before the step",
            UnheardWarning,
            stacklevel=3,
        )


def _is_waiting(parameter: Tensor) -> bool:
    ref = _WAITING.get(id(parameter))
    return ref is not None and ref() is parameter
