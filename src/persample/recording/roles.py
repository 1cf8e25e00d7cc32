"""Who takes part in a call: tensors with samples, and tensors of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..layouts import Constant, Layout, Operator, State, overlaps
from ..uses import COMPUTED, Context, Derived, Operand, View, transformed, version

Coloured = list[tuple[Tensor, State]]


class Roles:
    """The tensors of one call: with samples, of parameters, or ``loose``.

    ``batches``: which ones its samples are of; ``summed``: which ones sums over samples are of.
    ``closed``: shapes and closed layouts alone decide where the samples go.
    """

    __slots__ = ("batches", "closed", "coloured", "data", "loose", "owned", "summed")

    def __init__(self) -> None:
        self.coloured: Coloured = []
        self.owned: list[Tensor] = []
        self.loose: list[Tensor] = []
        self.data = self.closed = False
        self.batches = self.summed = 0

    def decided_by_shape(self, operator: Operator) -> bool:
        """Whether shapes alone say where an operator's rows go: no index takes part."""
        alone = len(self.coloured) == 1 and not self.owned and not self.loose
        return operator.by_shape or (operator.by_shape_alone and alone)

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
        """Sort a call's tensors."""
        roles = Roles()
        values = [*args, *kwargs.values()] if kwargs else args
        if self._sort(operator, values, roles) and roles.coloured:
            roles.closed = roles.decided_by_shape(operator)
        return roles

    def _sort(self, operator: Operator, values: Sequence[Any], roles: Roles) -> bool:
        """Whether every tensor is a constant, a parameter, or has a plain closed layout."""
        plain = (operator.by_shape or operator.by_shape_alone) and self._states.n != 1
        slots, table = self._slots, self._table
        for value in values:
            if isinstance(value, Tensor):
                where = id(value)
                if where in slots and where not in table and plain and not operator.shape_only:
                    roles.owned.append(value)
                    continue
                plain = plain and not value.is_nested  # has no shape
                if not operator.shape_only or value is values[0]:
                    plain = self._tensor(value, roles) and plain
            elif isinstance(value, (list, tuple)):
                plain = self._sort(operator, value, roles) and plain
            elif isinstance(value, dict):
                self._sort(operator, list(value.values()), roles)
                plain = False
        return plain

    def _tensor(self, value: Tensor, roles: Roles) -> bool:
        """Sort one tensor; whether it is a constant, a parameter, or has a plain closed layout."""
        mark = self._table.get(id(value))
        state: State | Derived | None
        if mark is not None and mark.unchanged(value):
            state = mark.state
        elif mark is None and id(value) in self._slots:
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
            roles.coloured.append((value, state))
            roles.data = True
            if mark is not None:
                roles.batches |= mark.batches
            return state.ids is None and state.coupled is None
        if isinstance(state, Derived):
            roles.owned.append(value)
            return True
        roles.coloured.append((value, state))
        roles.data = roles.data or not isinstance(state, Constant)
        if mark is not None:
            roles.summed |= mark.batches
        return False


def operand_of(context: Context, position: int, value: Tensor) -> Operand:
    """A parameter argument at a position among a call's leaves."""
    name = context.parameters.slots.get(id(value))
    if name is not None:
        known = name if name and value.requires_grad else None
        return Operand(position, value.detach(), known, version(value), id(value))
    state = context.look(value)
    operand = Operand(position, value.detach(), None, version(value))
    if isinstance(state, Derived) and state.selected:
        operand.edge = edge = torch.autograd.graph.get_gradient_edge(value)
        context.user_code.find_behind(edge.node)
        _find_view(context, value, operand)
        operand.lookup = state.lookup
        if operand.view is None and operand.lookup is None:
            _find_copies(operand)
    return operand


def _find_copies(operand: Operand) -> None:
    """Whether a derived tensor repeats another: class tokens and prompts, one for each sample."""
    node, shape = operand.edge.node, tuple(operand.value.shape)
    while node.name() == "CloneBackward0":
        node = node.next_functions[0][0]
    if node.name() not in ("ExpandBackward0", "RepeatBackward0"):
        return
    base = tuple(node._saved_self_sym_sizes)
    full = (*[1] * (len(shape) - len(base)), *base)
    axes = tuple(d for d, (one, all_) in enumerate(zip(full, shape, strict=True)) if one != all_)
    if not axes or 0 in shape or any(full[d] != 1 for d in axes):
        return
    value = operand.value
    for d in axes:
        value = value.narrow(d, 0, 1)
    operand.expanded = axes
    operand.once = Operand(operand.position, value.reshape(base), None, operand.version)
    operand.once.edge = GradientEdge(*node.next_functions[0])


def _find_view(context: Context, value: Tensor, operand: Operand) -> None:
    """Whether a derived tensor is a strided view of one recorded, contiguous parameter."""
    base = value._base
    name = None if base is None else context.parameters.slots.get(id(base))
    if base is None or not name or not base.is_contiguous():
        return
    if value.dtype != base.dtype or value.is_conj() or value.is_neg():
        return
    strides, sizes = value.stride(), list(value.shape)
    expanded = tuple(d for d, s in enumerate(sizes) if s > 1 and strides[d] == 0)
    for d in expanded:
        sizes[d] = 1
    if overlaps(sizes, strides):  # an element named twice (unfold)
        return
    offset = value.storage_offset() - base.storage_offset()
    operand.view = View(name, tuple(sizes), tuple(strides), int(offset))
    operand.expanded = expanded
