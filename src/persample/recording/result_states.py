"""What is known of a call's results: where samples go, marks, memory, parameters behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..guards.guards import Guards
from ..layouts import CONSTANT, PURE, Layout, Operator, State, collect
from ..uses import EXCLUDED, SELECTED, Context, Derived, Lookup, Mark, same, version
from .roles import Coloured, Roles


class Marking:
    """Marks the results of every call of a recording."""

    def __init__(self, context: Context, guards: Guards) -> None:
        self._context, self._guards = context, guards
        self._states, self._table = context.states, context.states.table
        self._slots = context.parameters.slots

    # ------------------------------------------------------------------ results with samples

    def store(
        self, operator: Operator, out: Any, states: Any, coloured: Coloured, *, written: bool
    ) -> None:
        """Mark an operator's results; ``written``: they were there before."""
        outs = collect(out)
        each = states if isinstance(states, list) else [states] * len(outs)
        for tensor, state in zip(outs, each, strict=True):
            if state is None and _has_history(tensor):
                state = CONSTANT
            elif state is None and all(s is PURE for _, s in coloured):
                state = PURE if _made(operator, tensor, {}, [t for t, _ in coloured]) else None
            if written:
                self.rewrite(tensor, state)
            elif state is not None:
                self._states.put(tensor, state, self.memory(operator, tensor, coloured[0][0]))
                if operator.name == "view_as":
                    # torch itself views an argument that a custom function returns as it is, and
                    # gives the view the function's node afterwards: look again
                    self._table[id(tensor)].history = False

    def rewrite(self, tensor: Tensor, state: State | None) -> None:
        """An operator wrote into a tensor."""
        known = self._table.get(id(tensor))
        if known is None and state is None:
            return
        before = known.state if known is not None else None
        if state in (None, CONSTANT) and isinstance(before, Layout) and tensor._base is not None:
            state = before  # constants in a part of it: they may have any owner
        self._context.written.add(tensor, known, state)
        self._states.rewrite(tensor, state or CONSTANT, changed=not same(before, state or CONSTANT))

    def memory(self, operator: Operator, out: Tensor, source: Tensor) -> Mark | None:
        """The mark of a tensor that shares its memory with a result."""
        if not operator.aliasing:
            return None
        if operator.name == "data":
            self._guards.numbers.hand_out(out)
            self._states.lend(out, source)
        return self._states.relative(out, source, detached=operator.name == "detach")

    # ------------------------------------------------------------------ results of parameters alone

    def derived(
        self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], owned: list[Tensor]
    ) -> Derived:
        """What a call on parameters and constants is about to make."""
        derived = SELECTED if any(self._context.is_selected(t) for t in owned) else EXCLUDED
        if operator.name == "embedding" and derived is SELECTED:
            return Derived(True, self._lookup(*args, **kwargs))
        return derived

    def derive(
        self, operator: Operator, out: Any, kwargs: dict[str, Any], derived: Derived,
        roles: Roles,
    ) -> None:  # fmt: skip
        """It has run: mark what it made."""
        owned = roles.owned
        for tensor in collect(out):
            if tensor.requires_grad and id(tensor) not in self._slots:
                if operator.inplace:
                    self._states.rewrite(tensor, derived, changed=True)
                elif tensor is not owned[0]:  # to() may return its argument
                    like = self.memory(operator, tensor, owned[0])
                    rows = self._same_rows(tensor, owned) if operator.aliasing else None
                    # autograd leads from no view that was made without gradients to its base
                    apart = not torch.is_grad_enabled() and tensor.grad_fn is None
                    self._states.put(tensor, PURE if apart else rows or derived, like)
                    if not torch.is_grad_enabled():  # a custom function may return this view
                        self._table[id(tensor)].history = False
            elif operator.inplace and id(tensor) in self._table:  # detach_()
                self._states.rewrite(tensor, PURE, changed=True)
            elif _made(operator, tensor, kwargs, [*owned, *(t for t, _ in roles.coloured)]):
                if derived is SELECTED or any(state is PURE for _, state in roles.coloured):
                    self._states.put(tensor, PURE)

    def _same_rows(self, tensor: Tensor, owned: list[Tensor]) -> Derived | None:
        """What is known of rows picked from a table also holds for a view that keeps them."""
        rows, state = owned[0], self._context.look(owned[0])
        if not isinstance(state, Derived) or state.lookup is None or len(owned) > 1:
            return None
        kept = tensor.dtype == rows.dtype and tensor.shape[-1:] == rows.shape[-1:]
        whole = tensor.numel() == rows.numel() > 0 and tensor.data_ptr() == rows.data_ptr()
        return state if kept and whole and rows.is_contiguous() and tensor.is_contiguous() else None

    def _lookup(
        self, weight: Tensor, indices: Tensor, padding_idx: int = -1,
        scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Lookup | None:  # fmt: skip
        """The arguments of torch.embedding; None where its gradient is not just rows."""
        name = self._slots.get(id(weight))
        if not name or scale_grad_by_freq:
            return None
        kept = self._context.caller.copied(indices)
        return Lookup(name, kept, padding_idx, weight.shape, version(kept))


def _has_history(tensor: Tensor) -> bool:
    """Whether gradients flow back from a tensor."""
    try:
        return tensor.requires_grad and not tensor.is_leaf
    except RuntimeError:  # a view that was made, and written to, without gradients
        return True


def _made(
    operator: Operator, tensor: Tensor, kwargs: dict[str, Any], given: Sequence[Tensor]
) -> bool:
    """Whether a result without gradient is new, not an argument or a part of one.

    It may be a view of what the operator made inside (an einsum that ends by a transposition).
    """
    if operator.inplace or "out" in kwargs or tensor.requires_grad:
        return False
    base = tensor._base
    return base is None or (
        not operator.aliasing and all(base is not t and base is not t._base for t in given)
    )
