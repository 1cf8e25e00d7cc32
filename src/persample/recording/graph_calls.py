"""Calls that build, read or run autograd's graph, or choose a branch of the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..autograd_graph import GraphNode
from ..backward.passes import Passes
from ..backward.user_backward import ENGINE, run_backward, run_grad, run_nested
from ..errors import Reason, from_torch, from_us, here
from ..guards.guards import Guards
from ..layouts import (
    COND,
    NEEDS_GRAD,
    SET_DATA,
    Additive,
    Constant,
    Layout,
    Mixed,
    Operator,
    closed,
)
from ..uses import Context, Derived, same, transformed, unseen
from .broadcast_parameters import NOTHING, Repeats
from .user_code.backward_code import follow_hook


class GraphCalls:
    """Answers those of one recording."""

    def __init__(self, context: Context, guards: Guards, passes: Passes, repeats: Repeats) -> None:
        self._context, self._guards, self._passes = context, guards, passes
        self._repeats, self._states = repeats, context.states
        self._slots = context.parameters.slots

    def answer(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """What such a call returns; NOTHING where it is like any other."""
        if func in ENGINE:
            return self._engine(func, args, kwargs)
        if operator.name == "grad_fn":
            return self._node(func, args[0])
        if func is Tensor.register_hook:
            self._leaves_its_module(args[0])
            self._repeats.exposed(args[0])
            hook = follow_hook(self._context, self._guards.numbers, *args, **kwargs)
            return func(args[0], hook)  # type: ignore[no-untyped-call]
        if operator.name == SET_DATA:
            return self._exchange(func, *args)
        if operator.name == COND:
            return self._branch(*args, **kwargs)
        if operator.name == NEEDS_GRAD:
            found = func(*args, **kwargs)
            if id(args[0]) not in self._slots and not self._context.backward.busy:
                self._context.user_code.expose(args[0])
                self._give_owners(args[0])
            return found
        return NOTHING

    def _give_owners(self, tensor: Tensor) -> None:
        """A constant by which a gradient will be taken: row i is sample i's, if it has n rows.

        A constant may have any owner, and a gradient by it needs one.
        """
        context = self._context
        if transformed(tensor) or not tensor.requires_grad:
            return
        if tensor.dim() and tensor.shape[0] == context.n:
            if isinstance(context.look(tensor), Constant):
                context.states.batches = 0
                context.states.put(tensor, closed(0))

    def _node(self, func: Any, tensor: Tensor) -> Any:
        """``tensor.grad_fn``: itself for torch's own code (modules' hooks), else to look at only.

        Whoever is given the node may hook it, and those behind it.
        """
        node = func(tensor)
        if node is None or from_us():
            return node
        if not from_torch():
            return GraphNode(node)
        self._context.user_code.exposed = True
        self._repeats.exposed(tensor, graph=True)
        return node

    def _leaves_its_module(self, tensor: Tensor) -> None:
        """fully_shard hooks what its modules return; a tensor derived from parameters is lost."""
        spread = self._context.processes
        if (
            spread is not None
            and spread.sharded
            and isinstance(self._context.look(tensor), Derived)
        ):
            why = "it is derived from parameters whose memory is freed when their module returns"
            fix = "compute it where it is used, or shard both modules as one group"
            reason = Reason("fully_shard", why, (tuple(tensor.shape),), here(), fix)
            self._states.put(tensor, Mixed(reason))

    def _exchange(self, func: Any, tensor: Tensor, value: Tensor) -> None:
        """``tensor.data = value``: the samples are where the value has them, the graph is not."""
        func(tensor, value)
        known, state = self._states.table.get(id(tensor)), self._context.look(value)
        if not isinstance(state, (Layout, Additive, Mixed)):
            return
        if id(tensor) in self._slots:
            self._states.put(tensor, unseen("its .data was exchanged for data of the samples"))
            return
        if known is None or not same(known.state, state):
            if tensor.requires_grad:
                state = unseen("its .data was exchanged for data with samples elsewhere")
            self._states.put(tensor, state)

    def _branch(self, chosen: Any, first: Any, second: Any, operands: Any) -> Any:
        """``torch.cond``: run one of the branches, as Python does."""
        with self._context.mode:
            return (first if chosen else second)(*operands)

    def _engine(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``loss.backward()`` and ``torch.autograd.grad`` inside the block."""
        if func is torch.autograd.grad:
            return run_grad(self._context, args, kwargs)
        if self._context.backward.busy:
            run_nested(self._context, func, args, kwargs)
        else:
            run_backward(self._passes, self._context, args, kwargs)
        return None
