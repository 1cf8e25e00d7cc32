"""What is known of backward: of its passes, and of code of the user's own that gradients pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from ..autograd_graph import ends_in, nodes_of
from ..errors import PersampleError, Reason


class PassState:
    """Set by whoever runs a backward pass; read by taps, hooks and custom functions in it."""

    def __init__(self) -> None:
        # the pass that runs
        self.receiving = False  # taps are listened to
        self.muted = False  # taps may fire without being listened to
        self.factor = 1.0  # what gradients are multiplied by, to undo a loss scale
        self.retain = True  # whether the graph is kept for another pass
        self.trouble: PersampleError | None = None  # why the answers cannot be trusted
        self.listener: Callable[[tuple[Tensor, ...]], None] | None = None  # told what taps bring
        # all passes so far
        self.count = 0
        self.scalar = False  # one number was back-propagated, not one loss per sample
        self.ordered = False  # loss i is sample i's
        self.coupled: Reason | None = None  # what scales the losses by a number of the whole batch
        self.extracted: Reason | None = None  # a number that left torch before the losses
        self.apart = True  # samples were proven separate, also where each loss had its own pass
        self.reference: list[Tensor | None] = []  # autograd's gradients of weighted losses
        self.by_caller = False  # a plain backward() of the caller's own started the last one
        self.call_count = 0  # how often the model had been called before the last one
        self.written: set[str] = set()  # parameters whose .grad was written to
        self.strict = False  # a backward pass from elsewhere raises at once
        self.plain_bytes = 0  # what a plain step holds at its highest point; 0 is not known

    @property
    def busy(self) -> bool:
        """Whether a backward pass of this recording runs."""
        return self.receiving or self.muted

    def refuse(self, error: PersampleError) -> None:
        """Note why the answers cannot be trusted; the first reason counts."""
        self.trouble = self.trouble or error

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """A pass whose gradients are not wanted: taps fire, and are not listened to."""
        before, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = before


class UserCode:
    """Facts that ``recording/user_code`` finds and others read."""

    def __init__(self) -> None:
        self.exposed = False  # gradients pass through hands that may write to them
        self.reentrant = False  # a checkpoint runs its part of the graph by itself in backward
        self.nested = False  # a user's torch.autograd.grad runs inside a backward pass
        self.second_order = False  # a gradient was taken to be differentiated again
        self.differentiable = False  # gradients by samples may be taken inside forward
        self.transforming = False  # torch.func ran code that was not followed
        self.by_hand: list[Any] = []  # nodes at which gradients of weights pass such code
        self.vouched: list[Any] = []  # nodes of rules that write rows themselves
        self.followed: dict[int, Any] = {}  # nodes of functions that are followed, by their ids
        self.ends: list[Any] = []  # of these, the ones that take parameters
        self.derived: list[Any] = []  # nodes of parameters' own graphs that functions take
        self.returning: list[set[int]] = []  # parameters of functions whose backward runs
        self.start = torch._C._autograd._get_sequence_nr()  # nodes of the block come later
        self._walked: set[Any] = set()

    def expose(self, tensor: Tensor) -> None:
        """A leaf that is no parameter may need a gradient, and have a hook that writes to it."""
        if tensor.requires_grad:
            self.differentiable = True
            self.exposed = self.exposed or bool(tensor._backward_hooks)

    def find_behind(self, node: Any) -> None:
        """Find functions in the graph of a weight whose results were not seen to become theirs.

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

    def returns(self, tensor: Tensor) -> bool:
        """Whether the function whose backward runs is to return what reaches this tensor."""
        if not self.returning:
            return False
        known = self.returning[-1]
        return id(tensor) in known if tensor.is_leaf else ends_in(tensor.grad_fn, known)

    def shares_graphs(self) -> bool:
        """Whether a function's run goes on through graphs of parameters that other uses need."""
        return any(
            at in self._walked and not hasattr(at, "variable")
            for node in self.derived
            for at in nodes_of(node)
        )

    def edges(self) -> list[GradientEdge]:
        """Functions of parameters: a pass that does not go on to these has to end in them."""
        return [GradientEdge(node, 0) for node in self.ends]

    def clear(self) -> None:
        """Forget the nodes."""
        for nodes in (self.by_hand, self.vouched, self.ends, self.derived):
            nodes.clear()
        self.followed.clear()
        self._walked.clear()
