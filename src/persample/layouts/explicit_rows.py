"""Samples by explicit ids: rows of graphs, ragged sequences end to end, tokens routed to experts.

Ids are values, and differ from batch to batch. Two things need to be found out once nevertheless. A
call that leaves every row in its place leaves the ids as they are, whatever they are. And what a
call does to ids is the same for the same ids, shapes and indices, which many layers share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .call import PLAIN, collect
from .layout import Coloured, Layout, State, uncoupled
from .operators import Operator
from .propagation import propagate


class Rows(Layout):
    """A layout by explicit ids, as type checkers see it."""

    ids: Tensor


def explicit_rows(state: Any) -> Rows | None:
    """A layout by explicit ids that is coupled to nothing."""
    explicit = state.__class__ is Layout and state.ids is not None and state.coupled is None
    return cast(Rows, state) if explicit else None


def viewed(rows: Rows, shape: torch.Size) -> Layout:
    """The same rows in a tensor of another rank."""
    if rows.ids.shape == shape:
        return rows
    return rows.once(shape, lambda: Layout(0, 1, rows.ids.reshape(shape)))


def common_rows(coloured: Coloured) -> Rows | None:
    """The explicit ids that all data of a call have."""
    each = [explicit_rows(state) for _, state in coloured]
    first = each[0]
    if first is None or any(one is None or one.ids is not first.ids for one in each):
        return None
    return first


def shapes_of_ids(
    operator: Operator, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any],
    out: Any, coloured: Coloured, rows: Rows,
) -> list[torch.Size] | None:  # fmt: skip
    """The shapes of the ids of all results, if shapes alone say that every row stays in its place.

    The layout rule is asked as if every row were a sample: rows that it keeps apart stay apart
    whatever the ids are.
    """
    ids, outs = rows.ids, collect(out)
    count = ids.numel()
    if count < 2:
        return None
    numbers = torch.arange(count, 0, -1, device=ids.device)
    other = Layout(0, 1, numbers.view(ids.shape))
    apart: Coloured = [(tensor, other) for tensor, _ in coloured]
    found = propagate(operator, func, tuple(args), kwargs, out, apart, count + 1)
    shapes = []
    for state in found if isinstance(found, list) else [found] * len(outs):
        same = explicit_rows(state)
        if same is None or not torch.equal(same.ids.flatten(), numbers):
            return None
        shapes.append(same.ids.shape)
    return shapes if len(shapes) == len(outs) else None


Moved = tuple[list[Tensor], list[Layout], State]  # indices, the ids that they moved, the result


class Moves:
    """What calls did to ids, by ids, shapes and indices."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Moved]] = {}

    def clear(self) -> None:
        """Forget every tensor."""
        self._known.clear()

    def propagate(
        self, operator: Operator, func: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any], out: Any, coloured: Coloured, n: int,
    ) -> Any:  # fmt: skip
        """The states of the results of a call on data."""
        key, indices, layouts = None, list[Tensor](), uncoupled(coloured)
        if all(id(tensor) in layouts for tensor, _ in coloured):
            indices = [t for t in collect([args, kwargs]) if _is_index(t)]
            by_shape = operator.by_shape and any(map(explicit_rows, layouts.values()))
            if by_shape or (operator.routes and indices):
                key = _key(layouts, (args, kwargs))
        if key is None:
            return propagate(operator, func, args, kwargs, out, coloured, n)
        known = self._known.setdefault((operator.name, n, key), [])
        for others, _, found in known:
            if all(map(torch.equal, others, indices)):
                return found
        state = propagate(operator, func, args, kwargs, out, coloured, n)
        if isinstance(state, Layout):
            kept = list(layouts.values())  # the key holds their ids: they must not be reused
            known.append(([index.clone() for index in indices], kept, state))
        return state


def _is_index(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _key(layouts: dict[int, Layout], value: Any) -> Any:
    """What a call's arguments are, but for the values of indices; None if one cannot be told."""
    if isinstance(value, Tensor):
        strided = value.layout is torch.strided and not value.is_nested
        layout = layouts.get(id(value))
        return (value.shape, value.dtype, layout and id(layout)) if strided else None
    if isinstance(value, slice):
        bounds = (value.start, value.stop, value.step)
        return None if collect(bounds) else _key(layouts, ("slice", *bounds))
    if isinstance(value, dict):
        return _key(layouts, tuple(value.items()))
    if isinstance(value, (list, tuple)):
        parts = [_key(layouts, each) for each in value]
        return None if None in parts else (value.__class__, *parts)
    return (value.__class__, value) if value.__class__ in PLAIN else None
