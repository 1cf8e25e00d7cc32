"""Run Python functions of torch so that the operators inside them are seen."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _no(*_: Any) -> bool:
    return False


_ASK = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def entered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without its test for ``__torch_function__``: its body runs under the mode."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        return function
    names = {**function.__globals__, **dict.fromkeys(_ASK, _no)}
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


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
