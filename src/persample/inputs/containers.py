"""Nested containers, opened and made again in one place: whatever batches and arguments come in.

Lists, tuples, named tuples, any ``Mapping`` (dictionaries, ``UserDict``, Hugging Face's
``BatchEncoding`` and ``ModelOutput``), dataclasses, and, on request, objects of the caller's own
class by their attributes (PyTorch Geometric's ``Data`` and ``Batch`` among them).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

# an object of one of these is no batch of the caller's own class
_CLOSED = (Tensor, nn.Module, Mapping, list, tuple, type, functools.partial, str, bytes)


def entries(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The keys and parts of a container; None if the value is none."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def attributes(value: Any, *, callables: bool = False) -> dict[str, Any] | None:
    """The attributes of an object of the caller's own class; None if the value is none.

    Among arguments, an object that can be called is more often a function than data: it is opened
    with ``callables`` alone. (Graphs of PyTorch Geometric can be called.)
    """
    if isinstance(value, _CLOSED) or dataclasses.is_dataclass(value):
        return None
    if callable(value) and (not callables or inspect.isroutine(value)):
        return None
    return dict(vars(value)) if hasattr(value, "__dict__") else None


def _nothing(value: Any) -> bool:
    return False


def mapped(
    value: Any,
    function: Callable[[Any], Any],
    *,
    whole: Callable[[Any], bool] = _nothing,
    objects: int = 0,
) -> Any:
    """The same nested containers with every tensor replaced; the value itself if none changed.

    ``function`` also replaces everything for which ``whole`` is true, which is not opened then.
    ``objects``: how deep objects of the caller's own class are opened, one inside another.
    Nothing is written to: what changes is a copy.
    """
    if isinstance(value, Tensor) or whole(value):
        return function(value)
    parts = entries(value)
    if parts is not None:
        old = dict(parts)
        new = {k: mapped(v, function, whole=whole, objects=objects) for k, v in old.items()}
        kept = all(new[key] is part for key, part in old.items())
        return value if kept else _rebuild(value, new)
    if objects and attributes(value, callables=True) is not None:
        return _copy_object(
            value, lambda part: mapped(part, function, whole=whole, objects=objects - 1)
        )
    return value


def leaves(value: Any, *, whole: Callable[[Any], bool] = _nothing, objects: int = 0) -> list[Any]:
    """The tensors in nested containers, and what ``whole`` is true for, in the order of mapped."""
    found: list[Any] = []

    def keep(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    mapped(value, keep, whole=whole, objects=objects)
    return found


def _rebuild(value: Any, parts: dict[Any, Any]) -> Any:
    """A container like ``value`` with other parts."""
    if isinstance(value, tuple):
        items = parts.values()
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        made: Any = copy.copy(value)
        made[:] = parts.values()
        return made
    if isinstance(value, Mapping):
        return _mapping(value, parts)
    made = copy.copy(value)
    for name, part in parts.items():
        object.__setattr__(made, name, part)  # a dataclass may be frozen
    return made


def _mapping(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """A mapping like ``value``; a dictionary where there is no copy that may be written to."""
    if isinstance(value, (dict, UserDict)) or hasattr(type(value), "__copy__"):
        made: Any = copy.copy(value)
        try:
            for key, part in parts.items():
                made[key] = part
        except TypeError:  # it takes no items
            return parts
        return made
    if hasattr(value, "__dict__"):  # copy.copy would share the dictionary inside it
        new = {id(old): parts[key] for key, old in value.items()}

        def exchanged(part: Any) -> Any:
            return mapped(part, lambda v: new.get(id(v), v), whole=lambda v: id(v) in new)

        made = _copy_object(value, exchanged)
        if all(made[key] is part for key, part in parts.items()):
            return made
    return parts


def _copy_object(value: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of an object whose attributes went through a function; itself if none changed.

    The copy is made first: objects that point back at their owner are then the copy's.
    """
    made = copy.copy(value)
    changed = False
    for name, part in list(vars(made).items()):
        new = function(part)
        if new is not part:
            object.__setattr__(made, name, new)
            changed = True
    return made if changed else value
