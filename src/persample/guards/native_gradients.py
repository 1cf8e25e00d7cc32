"""Native gradients of parameters: one that is there was missed, a step without any is idle."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..errors import LOOP, MissedUseError, UnheardWarning, warn_caller
from ..uses import Context

_LOCK = threading.Lock()
_WAITING: dict[int, weakref.ref[Tensor]] = {}  # parameters that a plain backward gave nothing
_HOOKED: list[Any] = []


class Escapes:
    """Takes ``.grad`` away from all leaves while a pass runs, and puts it back afterwards."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._leaves = context.parameters.leaves()
        self._before = [leaf.grad for leaf in self._leaves]
        for leaf, grad in zip(self._leaves, self._before, strict=True):
            if grad is not None:
                leaf.grad = None

    def restore(self) -> MissedUseError | None:
        """Undo what reached them; why the pass is refused, if something did."""
        escaped = [leaf for leaf in self._leaves if leaf.grad is not None]
        for leaf, grad in zip(self._leaves, self._before, strict=True):
            if leaf.grad is not grad:
                leaf.grad = grad
        if not escaped:
            return None
        names = {id(t): name for name, t in self._context.parameters.model.named_parameters()}
        found = [names.get(id(leaf), "?") for leaf in escaped]
        return _missed_use(found, reentrant=self._context.user_code.reentrant)


def _missed_use(names: Sequence[str], *, reentrant: bool) -> MissedUseError:
    return MissedUseError(
        "a parameter was used where the recorder could not see it: " + ", ".join(names[:4]),
        why="autograd computed an ordinary gradient for it (a scripted module, a custom "
        "autograd.Function, another thread, a graph built before the block)",
        fix="checkpoint(..., use_reentrant=False) everywhere" if reentrant else LOOP,
    )


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
        warn_caller(
            "this optimizer step trains nothing: the last backward() ran inside a persample.record "
            "block, which leaves no .grad; pass record(model, grad=True), or call "
            "tape.set_grad(...) before the step",
            UnheardWarning,
        )


def _is_waiting(parameter: Tensor) -> bool:
    ref = _WAITING.get(id(parameter))
    return ref is not None and ref() is parameter
