"""A user's own ``autograd.Function`` between parameters and loss.

Its forward runs operators that the recorder sees, so the layout of its result is known. What it
does in backward is Python too: the gradients it receives are marked with the layouts of its
results, and the gradients it returns must come out with samples apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from .errors import Reason, here
from .layout import Constant, Layout, State
from .marks import Derived, Mark, same, unseen

if TYPE_CHECKING:
    from .recorder import Recorder


class CustomFunctions:
    """The custom nodes of one recording."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._nodes: dict[int, tuple[Any, dict[int, State | Derived]]] = {}

    def clear(self) -> None:
        """Let go of the graph."""
        self._nodes.clear()

    def adopt(self, tensor: Tensor, mark: Mark) -> None:
        """A marked tensor became the result of a function the recorder did not see applied."""
        mark.history = True
        node = tensor.grad_fn
        if not isinstance(node, BackwardCFunction):
            name = node.name() if node is not None else "nothing"
            mark.state = unseen(f"it got a gradient history from {name}")
            return
        if getattr(type(node), "_forward_cls", None) is CheckpointFunction:
            return  # recomputes the forward under the recorder and back-propagates through that
        if isinstance(mark.state, (Layout, Constant)):
            self._follow(node, tensor, mark.state)

    def passed_through(self, tensor: Tensor) -> State | None:
        """A function that returned its input as it was: torch made a view of the input."""
        node, base = tensor.grad_fn, tensor._base
        if not isinstance(node, BackwardCFunction) or base is None or base.shape != tensor.shape:
            return None
        state = self.recorder.look(base)
        if not isinstance(state, Layout):
            return None
        self.recorder.marks.put(tensor, state, self.recorder.marks.table.get(id(base)))
        self._follow(node, tensor, state)
        return state

    def guarded(self, tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """A user's tensor hook that must keep samples apart while the recorder listens."""
        state = self.recorder.look(tensor)
        if not isinstance(state, Layout):
            return hook
        marks, ledger, place = self.recorder.marks, self.recorder.tape._ledger, here()

        def run(grad: Tensor) -> Tensor | None:
            if not ledger.receiving:
                return hook(grad)
            with torch._C.DisableTorchFunction():
                marks.put(grad, state)
            new = hook(grad)
            with torch._C.DisableTorchFunction():
                for result in (grad, new):
                    if result is not None and not same(self.recorder.look(result), state):
                        why = "a tensor hook changes gradients across samples, or hides how"
                        self._report(Reason("register_hook", why, (tuple(grad.shape),), place))
            return new

        return run

    def _follow(self, node: Any, tensor: Tensor, state: State) -> None:
        known = self._nodes.get(id(node))
        if known is not None and known[0] is node:
            known[1][tensor.output_nr] = state
            return
        states: dict[int, State | Derived] = {tensor.output_nr: state}
        self._nodes[id(node)] = (node, states)
        place, name = here(), node.name()
        marks = self.recorder.marks

        def before(grads: tuple[Tensor | None, ...]) -> None:
            with torch._C.DisableTorchFunction():
                for k, grad in enumerate(grads):
                    if grad is not None and isinstance(states.get(k), Layout):
                        marks.put(grad, states[k])

        def after(found: tuple[Tensor | None, ...], _: Any) -> None:
            with torch._C.DisableTorchFunction():
                for grad in found:
                    if grad is not None and not self._apart(grad):
                        why = f"the backward of {name} does not keep samples apart, or hides how"
                        reason = Reason(name, why, (tuple(grad.shape),), place)
                        self._report(reason)

        node.register_prehook(before)
        node.register_hook(after)

    def _apart(self, grad: Tensor) -> bool:
        state = self.recorder.look(grad)
        return isinstance(state, Layout) or (state is None and not bool(grad.any()))

    def _report(self, reason: Reason) -> None:
        ledger = self.recorder.tape._ledger
        if ledger.receiving and ledger.trouble is None:
            fix = 'record(..., unproven="loop") back-propagates each loss by itself'
            ledger.trouble = reason.error("a custom autograd.Function cannot be followed", fix=fix)
