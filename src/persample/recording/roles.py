"""Who takes part in a call: tensors with samples, and tensors of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..layouts import Operator
from ..layouts.layout import Constant, Layout, State
from ..uses.batches import COMPUTED
from ..uses.context import Context
from ..uses.tensor_states import Derived, transformed

_MINE = object()  # in a key: the tensor before is of parameters

Coloured = list[tuple[Tensor, State]]


class Roles:
    """The tensors of one call: with samples, of parameters, or ``loose``; ``key``: calls alike.

    ``batches``: which ones its samples are of; ``summed``: which ones sums over samples are of.
    """

    __slots__ = ("batches", "coloured", "data", "key", "loose", "owned", "summed")

    def __init__(self) -> None:
        self.coloured: Coloured = []
        self.owned: list[Tensor] = []
        self.loose: list[Tensor] = []
        self.data = False
        self.key: tuple[Any, ...] | None = None
        self.batches = self.summed = 0

    def all_batches(self) -> int:
        """The batches that the results are computed from, and whether parameters are in them."""
        batches = self.batches or self.summed
        return batches | COMPUTED if self.owned else batches


class Transformed(Exception):
    """A tensor of this call stands for another inside a torch.func transform."""


class Sorting:
    """Sorts the tensors of every call of a recording."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._states, self._table = context.states, context.states.table
        self._slots = context.parameters.slots

    def __call__(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Roles:
        """Sort a call's tensors; build its key where closed layouts and shapes decide."""
        roles = Roles()
        key: list[Any] = [operator.name, self._states.n]
        values = [*args, *kwargs.keys(), *kwargs.values()] if kwargs else args
        if self._sort(operator, values, roles, key) and roles.coloured:
            alone = len(roles.coloured) == 1 and not roles.owned and not roles.loose
            if operator.by_shape or alone:
                roles.key = tuple(key)
        return roles

    def _sort(
        self, operator: Operator, values: Sequence[Any], roles: Roles, key: list[Any]
    ) -> bool:
        """Whether every tensor is a constant, a parameter, or has a plain closed layout."""
        plain = (operator.by_shape or operator.by_shape_alone) and self._states.n != 1
        slots, table = self._slots, self._table
        for value in values:
            kind = value.__class__
            if isinstance(value, Tensor):
                where = id(value)
                if where in slots and where not in table and plain and not operator.shape_only:
                    key += (value.shape, _MINE)
                    roles.owned.append(value)
                    continue
                plain = plain and not value.is_nested  # has no shape
                key.append(value.shape if plain else None)
                if not operator.shape_only or len(key) <= 3:
                    plain = self._tensor(value, roles, key) and plain
            elif kind is int or kind is str:
                key.append(value)
            elif kind is list or kind is tuple or isinstance(value, (list, tuple)):
                key.append((kind, len(value)))
                plain = self._sort(operator, value, roles, key) and plain
            elif kind is slice:
                key.append(("slice", value.start, value.stop, value.step))
            elif isinstance(value, dict):
                plain = False
                self._sort(operator, list(value.values()), roles, key)
            else:
                key.append(repr(value) if kind is bool else value)
        return plain

    def _tensor(self, value: Tensor, roles: Roles, key: list[Any]) -> bool:
        """Sort one tensor; whether it is a constant, a parameter, or has a plain closed layout."""
        mark = self._table.get(id(value))
        state: State | Derived | None
        if mark is not None and mark.unchanged(value):
            state = mark.state
        elif mark is None and id(value) in self._slots:
            key.append(_MINE)
            roles.owned.append(value)
            return True
        elif mark is None and not self._context.backward.busy and transformed(value):
            raise Transformed
        else:
            state, mark = self._context.look(value), self._table.get(id(value))
        if state is None:
            roles.loose.append(value)
            if value.dim() == 0:
                return value.is_floating_point()
            return value.layout is torch.strided  # else, where it has entries decides
        if state.__class__ is Layout:
            key.append(state)
            roles.coloured.append((value, state))
            roles.data = True
            if mark is not None:
                roles.batches |= mark.batches
            return state.ids is None and state.coupled is None
        if isinstance(state, Derived):
            key.append(_MINE)
            roles.owned.append(value)
            return True
        roles.coloured.append((value, state))
        roles.data = roles.data or not isinstance(state, Constant)
        if mark is not None:
            roles.summed |= mark.batches
        return False
