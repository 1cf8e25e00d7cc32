"""Run Python functions of torch so that the operators inside them are seen."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


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
