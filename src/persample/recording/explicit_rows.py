"""Samples by explicit ids: rows of graphs, of sequences end to end, of what was routed.

Ids are values, and other ones in every batch. Two things are found out once nevertheless. A call
that leaves every row in its place leaves the ids as they are, whatever they are: it can be learned.
And what a call that moves rows by indices does to ids is computed once for the same ids and
indices, which layers have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..layouts import Layout, Operator, State, collect, propagate
from .program import plain
from .roles import Coloured


class Rows(Layout):
    """What type checkers take a layout by explicit ids for."""

    ids: Tensor


# stands for rows of samples by explicit ids, which every batch has of its own
ROWS = Layout(0, 1, torch.empty(0, dtype=torch.long, device="cpu"))


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
    operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any,
    coloured: Coloured, rows: Rows,
) -> list[torch.Size] | None:  # fmt: skip
    """The shapes of the ids of all results, if every row stays in its place, by shapes alone.

    The layout rule is asked with a sample for every row: where these stay apart, any do.
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


Moved = tuple[list[Tensor], list[State], Any]  # indices, whose rows they move, what came out


class Moves:
    """What became of ids in calls on rows, for the same ids, shapes and indices."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Moved]] = {}

    def clear(self) -> None:
        """Forget every tensor."""
        self._known.clear()

    def propagate(
        self, operator: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        out: Any, coloured: Coloured, n: int,
    ) -> Any:  # fmt: skip
        """The states of the results of a call on data."""
        key, given = None, list[Tensor]()
        if all(_uncoupled(state) for _, state in coloured):
            given = [t for t in collect([args, kwargs]) if _is_index(t)]
            by_shape = operator.by_shape and any(explicit_rows(state) for _, state in coloured)
            if by_shape or (operator.routes and given):
                key = _key({id(tensor): id(state) for tensor, state in coloured}, (args, kwargs))
        if key is None:
            return propagate(operator, func, args, kwargs, out, coloured, n)
        known = self._known.setdefault((operator.name, n, key), [])
        for indices, _, found in known:
            if all(map(torch.equal, indices, given)):
                return found
        found = propagate(operator, func, args, kwargs, out, coloured, n)
        if found.__class__ is Layout:
            states = [state for _, state in coloured]  # while they live, their ids are theirs
            known.append(([index.clone() for index in given], states, found))
        return found


def _uncoupled(state: Any) -> bool:
    return state.__class__ is Layout and state.coupled is None


def _is_index(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _key(states: dict[int, int], value: Any) -> Any:
    """What a call's arguments are, but for the values of indices; None if one cannot be told."""
    if isinstance(value, Tensor):
        strided = value.layout is torch.strided and not value.is_nested
        return (value.shape, value.dtype, states.get(id(value))) if strided else None
    if isinstance(value, slice):
        bounds = (value.start, value.stop, value.step)
        return None if collect(bounds) else _key(states, ("slice", *bounds))
    if isinstance(value, dict):
        return _key(states, tuple(value.items()))
    if isinstance(value, (list, tuple)):
        parts = [_key(states, each) for each in value]
        return None if None in parts else (value.__class__, *parts)
    return (value.__class__, value) if plain(value) is not None else None
