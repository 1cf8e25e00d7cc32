"""A user's own ``autograd.Function`` between parameters and loss.

A function's forward runs operators that the recorder sees, so the layout of its result is known.
What it does in backward is Python too: the gradients it receives are marked with the layouts of its
results, and the gradients it returns must come out with the layouts of its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction

from .errors import PersampleError, Reason, here
from .functions import OfParameters
from .hooks import Hooks
from .layout import PURE, Additive, Constant, Layout, State
from .marks import EXCLUDED, SELECTED, Derived, Mark, gained_history, unseen
from .nodes import built_in, is_edge, leaves_of, nodes_of, own_functions
from .watch import Followed, Watch

if TYPE_CHECKING:
    from .recorder import Recorder


_VIEWS = frozenset(("ViewBackward0", "AliasBackward0", "UnsafeViewBackward0"))


class CustomFunctions(Hooks):
    """The custom nodes of one recording."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.reentrant = False
        self.vouched: list[Any] = []  # nodes of rules that write rows themselves
        self.derived: list[Any] = []  # nodes of parameters' own graphs that functions take
        self._walked: set[Any] = set()
        self._start = torch._C._autograd._get_sequence_nr()
        self._nodes: dict[int, Followed] = {}
        self._read: list[tuple[Tensor, Layout]] = []

    def clear(self) -> None:
        """Let go of the graph; its nodes hold hooks that lead back here."""
        for followed in self._nodes.values():
            if followed.own is not None:
                followed.own.use.rule = None
            followed.node = followed.own = None
        self._nodes.clear()
        self.derived.clear()
        self._read.clear()
        self.by_hand.clear()
        self.vouched.clear()
        self._walked.clear()

    def read(self, coloured: list[tuple[Tensor, State]]) -> None:
        """Tensors of the graph that were read without gradients: a function's arguments, maybe."""
        if self.recorder.busy and torch._C._functorch.peek_interpreter_stack() is not None:
            self.taken.hide("torch.func")
        for tensor, state in coloured:
            if isinstance(state, Layout) and tensor.requires_grad:
                self._read.append((tensor, state))

    def forget_read(self) -> None:
        """No function is being applied."""
        self._read.clear()

    def leave(self) -> None:
        """Something with gradients is called: the function, if there was one, has been left.

        Its result may not have been looked at yet, and its arguments are known now.
        """
        if not self._read:
            return
        for mark in list(self.recorder.marks.table.values()):
            if not mark.history:
                tensor = mark()
                if tensor is not None and gained_history(mark, tensor):
                    self.adopt(tensor, mark)
        self._read.clear()

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
        self.exposed = True
        if getattr(type(node), "_forward_cls", None) is CheckpointFunction:
            self.reentrant = True
            return  # recomputes the forward under the recorder and back-propagates through that
        if mark.state is PURE or isinstance(mark.state, Derived):
            if mark.state is EXCLUDED:
                return
            # what a function saves is recomputed or fetched by such hooks, unseen after backward
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if id(node) in self._nodes:
                mark.state = unseen(f"{node.name()} returned data and parameters")
            elif hooks is None and self._of_parameters(node):
                mark.state = SELECTED
                self.by_hand.append(node)
            else:
                mark.state = unseen(f"{node.name()} made it of parameters while checkpointing")
            return
        if node in self.by_hand:
            mark.state = unseen(f"{node.name()} returned data and parameters")
        elif isinstance(mark.state, (Layout, Constant, Additive)):
            base = tensor._base
            if isinstance(mark.state, Layout) and base is not None:
                self._read.append((base, mark.state))
            self._follow(node, tensor, mark.state)

    def shared(self) -> bool:
        """Whether a function's run goes on through graphs of parameters that other uses need."""
        return any(
            at in self._walked and not hasattr(at, "variable")
            for node in self.derived
            for at in nodes_of(node)
        )

    def edges(self) -> list[GradientEdge]:
        """Functions of parameters: a pass that does not go on to these has to end in them."""
        found = [f.node for f in self._nodes.values() if f.own is not None and f.own.edges]
        return [GradientEdge(node, 0) for node in found]

    def unfollowed(self, roots: Sequence[Any]) -> PersampleError | None:
        """Why not, where a function of the block is on the way whose results were not its own.

        A forward that enables gradients may return a tensor that had a history, and was known.
        """
        if not own_functions():
            return None
        for node in (node for root in roots for node in nodes_of(root)):
            if not isinstance(node, BackwardCFunction) or built_in(type(node)):
                continue
            known = id(node) in self._nodes or node in self.by_hand or node in self.vouched
            if not known and node._sequence_nr() >= self._start and not self._of_parameters(node):
                name = type(node).__name__
                why = f"the forward of {name} returns a tensor with a history of its own"
                reason = Reason("a custom function", why, (), None)
                return reason.error(
                    "gradients cannot be followed in backward",
                    fix="return the tensor detached: torch gives it the function's history",
                )
        return None

    def behind(self, node: Any) -> None:
        """Find functions in the graph of a weight whose results nobody saw become theirs.

        A forward that enables gradients returns what has a history already.
        """
        waiting = [node]
        while waiting:
            at = waiting.pop()
            if at is None or at in self._walked:
                continue
            self._walked.add(at)
            if isinstance(at, BackwardCFunction) and at not in self.by_hand:
                self.exposed = True
                self.by_hand.append(at)
            waiting += [into for into, _ in at.next_functions]

    def _of_parameters(self, node: Any) -> bool:
        """Whether a function's graph ends in parameters of the model, and nowhere else."""
        slots, ends = self.recorder.parameters.slots, leaves_of(node)
        return bool(ends) and all(id(leaf) in slots for leaf in ends)

    def of_excluded(self, node: Any) -> bool:
        """Whether a graph ends in parameters that are not recorded, and nowhere else.

        To those that are it is a constant, whatever made it.
        """
        slots = self.recorder.parameters.slots
        ends = [slots.get(id(leaf)) for leaf in leaves_of(node)]
        return bool(ends) and all(slot is not None and slot.name is None for slot in ends)

    def passed_through(self, tensor: Tensor) -> State | None:
        """A function that returned its input as it was: torch made a view of the input."""
        node, base = tensor.grad_fn, tensor._base
        if not isinstance(node, BackwardCFunction) or base is None or base.shape != tensor.shape:
            return None
        state = self.recorder.look(base)
        if not isinstance(state, Layout):
            return None
        self._read.append((base, state))
        self.recorder.marks.put(tensor, state, self.recorder.marks.table.get(id(base)))
        self._follow(node, tensor, state)
        return state

    def unpacked(self, tensor: Tensor) -> State | None:
        """A function's own result that it saved for backward: the same, as another object."""
        node = tensor.grad_fn
        known = self._nodes.get(id(node))
        if known is None or known.node is not node:
            return None
        state = known.results.get(tensor.output_nr)
        if state is not None:
            self.recorder.marks.put(tensor, state)
        return state

    def _follow(self, node: Any, tensor: Tensor, state: State) -> None:
        self.exposed = True
        known = self._nodes.get(id(node))
        if known is None or known.node is not node:
            known = self._nodes[id(node)] = Followed(node)
            if isinstance(state, Layout):
                known.own = OfParameters(self.recorder, node, here())
            Watch(self, known, here())
        known.results[tensor.output_nr] = state
        for k, (into, number) in enumerate(node.next_functions):
            if into is not None and k not in known.arguments:
                layout = self._argument(into, number)
                if layout is not None:
                    known.arguments[k] = layout

    def _argument(self, node: Any, number: int) -> Layout | None:
        """The layout of the tensor that a graph edge leads to, if it is alive or was just read."""
        for source, layout in self._read:
            if is_edge(source, node, number):
                return layout
        for mark in list(self.recorder.marks.table.values()):
            tensor = mark()
            if tensor is not None and tensor.requires_grad and isinstance(mark.state, Layout):
                if is_edge(tensor, node, number):
                    return mark.state
        return None
