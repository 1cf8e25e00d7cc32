"""Which arguments of a call are parameters, and how they lead back to recorded ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .context import Context
from .tensor_states import Derived, version
from .use import Operand, View


def operand_of(context: Context, position: int, value: Tensor) -> Operand:
    """A parameter argument at a position among a call's leaves."""
    slot = context.parameters.slots.get(id(value))
    if slot is not None:
        name = slot.name if value.requires_grad else None
        return Operand(position, value.detach(), name, version(value), id(value))
    edge, state = None, context.look(value)
    if isinstance(state, Derived) and state.selected:
        edge = torch.autograd.graph.get_gradient_edge(value)
    operand = Operand(position, value.detach(), None, version(value))
    if edge is not None:
        operand.edge = edge
        context.user_code.find_behind(edge.node)
        _find_view(context, value, operand)
        operand.lookup = state.lookup if isinstance(state, Derived) else None
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
    if len(shape) < len(base):
        return
    full = (*[1] * (len(shape) - len(base)), *base)
    axes = tuple(d for d, (one, all_) in enumerate(zip(full, shape, strict=True)) if one != all_)
    if not axes or 0 in shape or any(full[d] != 1 for d in axes):
        return
    value, into = operand.value, node.next_functions[0]
    for d in axes:
        value = value.narrow(d, 0, 1)
    edge = GradientEdge(*into)
    operand.expanded = axes
    operand.once = Operand(operand.position, value.reshape(base), None, operand.version)
    operand.once.edge = edge


def _find_view(context: Context, value: Tensor, operand: Operand) -> None:
    """Whether a derived tensor is a strided view of one recorded, contiguous parameter."""
    base = value._base
    slot = None if base is None else context.parameters.slots.get(id(base))
    if base is None or slot is None or slot.name is None or not base.is_contiguous():
        return
    if value.dtype != base.dtype or value.is_conj() or value.is_neg():
        return
    strides, sizes = value.stride(), list(value.shape)
    expanded = tuple(d for d, s in enumerate(sizes) if s > 1 and strides[d] == 0)
    for d in expanded:
        sizes[d] = 1
    kept = sorted((strides[d], sizes[d]) for d in range(len(sizes)) if sizes[d] > 1)
    reach = 1
    for stride, size in kept:  # an element named twice (unfold) is no view of distinct elements
        if stride < reach:
            return
        reach = stride * (size - 1) + reach
    offset = value.storage_offset() - base.storage_offset()
    operand.view = View(slot.name, tuple(sizes), tuple(strides), int(offset))
    operand.expanded = expanded
