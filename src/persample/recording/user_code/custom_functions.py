"""A user's own ``autograd.Function`` between parameters and loss.

A function's forward runs operators that the recorder sees, so the layout of its result is known.
What it does in backward is Python too: the gradients it receives are marked with the layouts of its
results, and the gradients it returns must come out with the layouts of its arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from ...autograd_graph import ends_in, is_edge, leaves_of
from ...errors import here
from ...guards.extracted_numbers import ExtractedNumbers
from ...layouts import PURE, Additive, Constant, Layout, State, collect
from ...uses import (
    EXCLUDED,
    SELECTED,
    Context,
    Derived,
    Mark,
    gained_history,
    transformed,
    unseen,
)
from .backward_code import Followed, FollowedBackward
from .custom_parameters import OfParameters

_VIEWS = frozenset(("ViewBackward0", "AliasBackward0", "UnsafeViewBackward0"))


class CustomFunctions:
    """The custom nodes of one recording."""

    def __init__(self, context: Context, numbers: ExtractedNumbers) -> None:
        self.context, self.numbers = context, numbers
        self._facts = context.user_code
        self._nodes: dict[int, Followed] = {}
        self.pending: list[tuple[Tensor, Layout]] = []  # read without gradients

    def clear(self) -> None:
        """Let go of the graph; its nodes hold hooks that lead back here."""
        for followed in self._nodes.values():
            if followed.own is not None:
                followed.own.use.rule = None
            followed.node = followed.own = None
        self._nodes.clear()
        self.pending.clear()

    def read(self, coloured: list[tuple[Tensor, State]]) -> None:
        """Tensors of the graph that were read without gradients: a function's arguments, maybe."""
        if self.context.backward.busy and torch._C._functorch.peek_interpreter_stack() is not None:
            self.numbers.hide("torch.func")
        for tensor, state in coloured:
            if isinstance(state, Layout) and tensor.requires_grad:
                self.pending.append((tensor, state))

    def read_by(self, args: Any, kwargs: Any) -> None:
        """A call that was followed without gradients reads these."""
        given = [t for t in collect([args, kwargs or {}]) if t.requires_grad]
        self.read([(t, s) for t in given if isinstance(s := self.context.look(t), Layout)])

    def left_by(self, args: Any, kwargs: Any) -> bool:
        """Leave, if samples take part in a call with gradients; whether they do."""
        tensors = collect([args, kwargs or {}])
        if any(map(transformed, tensors)):
            return False
        if all(isinstance(state, Derived | None) for state in map(self.context.look, tensors)):
            return False
        self.leave()
        return True

    def leave(self) -> None:
        """Something with gradients is called: the function, if there was one, has been left.

        Its result may not have been looked at yet, and its arguments are known now.
        """
        if not self.pending:
            return
        for mark in list(self.context.states.table.values()):
            if not mark.history:
                tensor = mark()
                if tensor is not None and gained_history(mark, tensor):
                    self.adopt(tensor, mark)
        self.pending.clear()

    def adopt(self, tensor: Tensor, mark: Mark) -> None:
        """A marked tensor became the result of a function the recorder did not see applied."""
        mark.history = True
        node = tensor.grad_fn
        if node is not None and node.name() in _VIEWS and tensor._base is not None:
            return
        if not isinstance(node, BackwardCFunction):
            name = node.name() if node is not None else "nothing"
            mark.state = unseen(f"it got a gradient history from {name}")
            return
        self._facts.exposed = True
        if getattr(type(node), "_forward_cls", None) is CheckpointFunction:
            self._facts.reentrant = True
            return  # recomputes the forward under the recorder and back-propagates through that
        if mark.state is PURE or isinstance(mark.state, Derived):
            if mark.state is EXCLUDED:
                return
            # what a function saves is recomputed or fetched by such hooks, unseen after backward
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if id(node) in self._nodes:
                mark.state = unseen(f"{node.name()} returned data and parameters")
            elif hooks is None and ends_in(node, self.context.parameters.slots):
                mark.state = SELECTED
                self._facts.by_hand.append(node)
            else:
                mark.state = unseen(f"{node.name()} made it of parameters while checkpointing")
            return
        if node in self._facts.by_hand:
            mark.state = unseen(f"{node.name()} returned data and parameters")
        elif isinstance(mark.state, (Layout, Constant, Additive)):
            base = tensor._base
            if isinstance(mark.state, Layout) and base is not None:
                self.pending.append((base, mark.state))
            self._follow(node, tensor, mark.state)

    def of_excluded(self, node: Any) -> bool:
        """Whether a graph ends in parameters that are not recorded, and nowhere else.

        To those that are it is a constant, whatever made it.
        """
        slots = self.context.parameters.slots
        ends = [slots.get(id(leaf)) for leaf in leaves_of(node)]
        return bool(ends) and all(name == "" for name in ends)

    def unpacked(self, tensor: Tensor) -> State | None:
        """A function's own result that it saved for backward: the same, as another object."""
        node = tensor.grad_fn
        known = self._nodes.get(id(node))
        if known is None or known.node is not node:
            return None
        state = known.results.get(tensor.output_nr)
        if state is not None:
            self.context.states.put(tensor, state)
        return state

    def _follow(self, node: Any, tensor: Tensor, state: State) -> None:
        self._facts.exposed = True
        known = self._nodes.get(id(node))
        if known is None or known.node is not node:
            known = self._nodes[id(node)] = Followed(node)
            self._facts.followed[id(node)] = node
            if isinstance(state, Layout):
                known.own = OfParameters(self.context, node, here())
                if known.own.edges:
                    self._facts.ends.append(node)
            FollowedBackward(self, known, here())
        known.results[tensor.output_nr] = state
        for k, (into, number) in enumerate(node.next_functions):
            if into is not None and k not in known.arguments:
                layout = self._argument(into, number)
                if layout is not None:
                    known.arguments[k] = layout

    def _argument(self, node: Any, number: int) -> Layout | None:
        """The layout of the tensor that a graph edge leads to, if it is alive or was just read."""
        for source, layout in self.pending:
            if is_edge(source, node, number):
                return layout
        for mark in list(self.context.states.table.values()):
            tensor = mark()
            if tensor is not None and tensor.requires_grad and isinstance(mark.state, Layout):
                if is_edge(tensor, node, number):
                    return mark.state
        return None
