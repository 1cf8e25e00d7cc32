"""Run Python functions of torch so that the operators inside them are seen."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

_ASK = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """As torch's, by one call for each: a parameter among data stays a parameter."""
    given: Sequence[Tensor] = tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors
    shape = torch.broadcast_shapes(*[t.shape for t in given])
    return tuple([t.expand(shape) for t in given])


_OWN = {torch.functional.broadcast_tensors: _broadcast_tensors}


@functools.cache
def entered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without its test for ``__torch_function__``: its body runs under the mode."""
    if function in _OWN:
        return _OWN[function]
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        return function
    names = {**function.__globals__, **dict.fromkeys(_ASK, lambda *_: False)}
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def below(mode: TorchFunctionMode) -> list[TorchFunctionMode]:
    """Take away the user's modes that are open, to be put :func:`above` this one again.

    What they make of a call is seen then, as if they had been entered later.
    """
    modes: list[TorchFunctionMode] = []
    while stack := _get_current_function_mode_stack():
        if stack[-1] is mode or type(stack[-1]).__module__.split(".")[0] in ("torch", "persample"):
            break
        modes.append(_pop_mode())
    return modes


def above(modes: list[TorchFunctionMode]) -> None:
    """Put modes back."""
    for mode in reversed(modes):
        _push_mode(mode)


def watching(mode: TorchFunctionMode) -> contextlib.AbstractContextManager[Any]:
    """The mode, switched on if it is not (after the block, or while it handles a call)."""
    stack = _get_current_function_mode_stack()
    if not stack:
        return mode
    return contextlib.nullcontext() if mode in stack else _among(mode)


@contextlib.contextmanager
def _among(mode: TorchFunctionMode) -> Iterator[None]:
    modes = below(mode)
    with mode:
        above(modes)
        try:
            yield
        finally:
            modes = below(mode)
    above(modes)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Saved tensors are kept as they are, whatever checkpointing or offloading is going on.

    What parameters alone give is small, and is asked for after the backward pass: a recomputation
    then would not be seen.
    """
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
