"""Nested containers with their tensors replaced."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same nested containers with every tensor replaced; the value itself if none changed."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [mapped(v, function) for v in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        found = {k: mapped(v, function) for k, v in value.items()}
        if all(found[k] is v for k, v in value.items()):
            return value
        made = copy.copy(value)
        for k, v in found.items():
            made[k] = v  # type: ignore[index]
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        parts = {name: mapped(getattr(value, name), function) for name in names}
        if all(parts[name] is getattr(value, name) for name in names):
            return value
        twin: Any = copy.copy(value)
        for name, part in parts.items():
            object.__setattr__(twin, name, part)
        return twin
    return value
