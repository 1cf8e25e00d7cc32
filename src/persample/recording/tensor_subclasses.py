"""Classes of tensors that say themselves what a torch function does with them.

Their ``__torch_function__`` may do anything, so it is not the call that is recorded, but what that
code calls in turn. It usually ends by giving the result its class, which torch lets nobody see: the
object is new, and shares the memory of a result that was seen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..layouts import State, collect, place_of
from ..uses import Context, Derived, TensorStates


@functools.lru_cache(maxsize=256)
def overridden(kinds: tuple[type[Tensor], ...]) -> bool:
    """Whether one of these classes has a ``__torch_function__`` that torch did not write."""
    own = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return any(
        getattr(kind.__torch_function__, "__func__", own) is not own
        and kind.__module__.split(".")[0] != "torch"
        for kind in kinds
    )


class _Listening(TorchFunctionMode):
    """Keeps what the calls below it were given, and gave."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen += collect((args, out))
        return out


def override(
    context: Context, seen: list[Tensor], func: Any, kinds: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run the classes' own code for a call, and mark what it returns.

    ``seen``: what such code met, while it runs.
    """
    outermost = not seen
    seen += collect((args, kwargs))
    try:
        with context.mode, _Listening(seen):
            for kind in kinds:
                found = kind.__torch_function__(func, kinds, args, kwargs)
                if found is not NotImplemented:
                    break
            else:
                raise TypeError(f"no implementation of {func} was found for {kinds}")
        for result in collect(found):
            context.look(result)
    finally:
        if outermost:
            seen.clear()
    return found


def behind(marks: TensorStates, result: Tensor, seen: list[Tensor]) -> State | Derived | None:
    """The state of a tensor that an unknown one is another object for."""
    with torch._C.DisableTorchFunction():
        for tensor in reversed(seen):
            known = marks.table.get(id(tensor))
            if known is not None and known.unchanged(tensor) and _alias(result, tensor):
                marks.put(result, known.state, known)
                return known.state
    return None


def _alias(result: Tensor, tensor: Tensor) -> bool:
    """Whether they are the same memory, seen the same way, with the same history."""
    one, other = result.grad_fn, tensor.grad_fn
    if one is not None and one is not other:
        edge = None if other is None else (other, tensor.output_nr)
        if one.name() != "AliasBackward0" or one.next_functions != (edge,):
            return False
    return (one is None) == (other is None) and place_of(result) == place_of(tensor)
