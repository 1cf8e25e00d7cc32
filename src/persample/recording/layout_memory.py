"""Where the samples go in a call, remembered where shapes and closed layouts alone decide."""

from __future__ import annotations

from typing import Any

from ..layouts import Operator, propagate
from ..layouts.layout import Additive, Layout
from .roles import Roles

_MEMORY: dict[tuple[Any, ...], Any] = {}
_LIMIT = 1 << 14
_UNKNOWN = object()


def layouts_of(
    n: int, operator: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
    out: Any, roles: Roles,
) -> Any:  # fmt: skip
    """The states of a call's results."""
    key, found = roles.key, _UNKNOWN
    if key is not None:
        try:
            found = _MEMORY.get(key, _UNKNOWN)
        except TypeError:  # an argument that cannot be compared
            key = None
    if found is _UNKNOWN:
        found = propagate(operator, func, args, kwargs, out, roles.coloured, n)
        if key is not None and _lasting(found):
            if len(_MEMORY) >= _LIMIT:
                _MEMORY.clear()
            _MEMORY[key] = found
    return found


def _lasting(states: Any) -> bool:
    """Whether states hold for every call with the same key: no reasons, no tensors in them."""
    each = states if isinstance(states, list) else [states]
    return all(
        state is None
        or (isinstance(state, Layout) and state.ids is None and state.coupled is None)
        or (isinstance(state, Additive) and state.coupled is None)
        for state in each
    )
