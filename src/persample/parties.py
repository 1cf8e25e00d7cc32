"""Who takes part in a call: tensors with samples, and tensors of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .layout import Constant, Layout, State
from .marks import Derived, transformed
from .propagate import Operator

if TYPE_CHECKING:
    from .recorder import Recorder

_MINE = object()  # in a key: the tensor before is of parameters

Coloured = list[tuple[Tensor, State]]


class Parties:
    """The tensors of one call: with samples, of parameters, or ``loose``; ``key``: calls alike."""

    __slots__ = ("coloured", "data", "key", "loose", "owned")

    def __init__(self) -> None:
        self.coloured: Coloured = []
        self.owned: list[Tensor] = []
        self.loose: list[Tensor] = []
        self.data = False
        self.key: tuple[Any, ...] | None = None


class Transformed(Exception):
    """A tensor of this call stands for another inside a torch.func transform."""


class Sorting:
    """Sorts the tensors of every call of a recording."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._marks, self._table = recorder.marks, recorder.marks.table
        self._slots = recorder.parameters.slots

    def __call__(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Parties:
        """Sort a call's tensors; build its key where closed layouts and shapes decide."""
        parties = Parties()
        key: list[Any] = [operator.name, self._marks.n]
        values = [*args, *kwargs.keys(), *kwargs.values()] if kwargs else args
        if self._sort(operator, values, parties, key) and parties.coloured:
            parties.key = tuple(key)
        return parties

    def _sort(
        self, operator: Operator, values: Sequence[Any], parties: Parties, key: list[Any]
    ) -> bool:
        """Whether every tensor is a constant, a parameter, or has a plain closed layout."""
        plain = operator.by_shape and self._marks.n != 1
        slots, table = self._slots, self._table
        for value in values:
            kind = value.__class__
            if isinstance(value, Tensor):
                where = id(value)
                if where in slots and where not in table and plain and not operator.shape_only:
                    key += (value.shape, _MINE)
                    parties.owned.append(value)
                    continue
                plain = plain and not value.is_nested  # has no shape
                key.append(value.shape if plain else None)
                if not operator.shape_only or len(key) <= 3:
                    plain = self._tensor(value, parties, key) and plain
            elif kind is int or kind is str:
                key.append(value)
            elif kind is list or kind is tuple or isinstance(value, (list, tuple)):
                key.append((kind, len(value)))
                plain = self._sort(operator, value, parties, key) and plain
            elif kind is slice:
                key.append(("slice", value.start, value.stop, value.step))
            elif isinstance(value, dict):
                plain = False
                self._sort(operator, list(value.values()), parties, key)
            else:
                key.append(repr(value) if kind is bool else value)
        return plain

    def _tensor(self, value: Tensor, parties: Parties, key: list[Any]) -> bool:
        """Sort one tensor; whether it is a constant, a parameter, or has a plain closed layout."""
        mark = self._table.get(id(value))
        state: State | Derived | None
        if mark is not None and mark.unchanged(value):
            state = mark.state
        elif mark is None and id(value) in self._slots:
            key.append(_MINE)
            parties.owned.append(value)
            return True
        elif mark is None and not self.recorder.busy and transformed(value):
            raise Transformed
        else:
            state = self.recorder.look(value)
        if state is None:
            parties.loose.append(value)
            if value.dim() == 0:
                return value.is_floating_point()
            return value.layout is torch.strided  # else, where it has entries decides
        if state.__class__ is Layout:
            key.append(state)
            parties.coloured.append((value, state))
            parties.data = True
            return state.ids is None and state.coupled is None
        if isinstance(state, Derived):
            key.append(_MINE)
            parties.owned.append(value)
            return True
        parties.coloured.append((value, state))
        parties.data = parties.data or not isinstance(state, Constant)
        return False
