"""A user's hooks on tensors, and what is noted of any code of theirs that gradients pass.

A hook gets a gradient marked with the layout of its tensor; what it returns must have that layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import LOOP, Place, Reason, here
from .layout import Layout
from .marks import Derived, same
from .taken import Received, Taken
from .tap import Tap

if TYPE_CHECKING:
    from .recorder import Recorder


class Hooks:
    """The hooks of one recording."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.exposed = False  # gradients pass through hands that may write to them
        self.by_hand: list[Any] = []  # nodes at which those of weights do, too
        self.nested = False  # a user's torch.autograd.grad runs inside a backward pass
        self.taken = Taken(recorder)

    def expose(self, tensor: Tensor) -> None:
        """A hook that was registered before the block may write to gradients."""
        if tensor.requires_grad and tensor._backward_hooks:
            self.exposed = True

    def guarded(self, tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """A user's tensor hook that must keep samples apart while the recorder listens."""
        self.exposed = True
        state = self.recorder.look(tensor)
        if not isinstance(state, Layout):
            if isinstance(state, Derived) and tensor.grad_fn is not None:
                self.by_hand.append(tensor.grad_fn)
            return hook
        return Guard(self, tensor, state, hook)

    def receiving(self) -> bool:
        """Whether a pass is being recorded; hooks of a graph may outlive the tape."""
        tape = self.recorder.tape_ref()
        return tape is not None and tape._ledger.receiving

    def report(self, who: str, grad: Tensor, place: Place | None, why: str = "") -> None:
        """A gradient cannot be followed: the running pass is refused."""
        tape = self.recorder.tape_ref()
        ledger = None if tape is None else tape._ledger
        if ledger is None or not (ledger.receiving or self.nested):
            return
        if ledger.trouble is None:
            why = why or f"{who} does not keep samples apart, or hides how"
            reason = Reason(who, why, (tuple(grad.shape),), place)
            ledger.trouble = reason.error("gradients cannot be followed in backward", fix=LOOP)


class Guard:
    """A user's hook: marks the gradient that it is given, and judges what it makes of it."""

    def __init__(
        self, hooks: Hooks, tensor: Tensor, layout: Layout, hook: Callable[[Tensor], Tensor | None]
    ) -> None:
        self._hooks, self._layout, self._hook, self._place = hooks, layout, hook, here()
        known = hooks.recorder.marks.table.get(id(tensor))
        tapped = tensor.dim() > 2 and _is_tap(tensor.grad_fn)
        self._family = known.family if known is not None and tapped else None
        self._version = 0 if self._family is None else self._family.version

    def __call__(self, grad: Tensor) -> Tensor | None:
        """Run the hook."""
        hooks = self._hooks
        if not (hooks.receiving() or hooks.nested):
            return self._hook(grad)
        with torch._C.DisableTorchFunction():
            received = Received([grad])
            if self._family is not None and self._family.version != self._version:
                # without a recorder it may have been a view, and torch drops a view's hooks
                self._report(grad, "its tensor was written to in place after it was registered")
            hooks.recorder.marks.put(grad, self._layout)
        hooks.taken.running.append(received)
        try:
            new = self._hook(grad)
        finally:
            hooks.taken.running.pop()
        with torch._C.DisableTorchFunction():
            self._judge(received, grad, new)
        return new

    def _judge(self, received: Received, grad: Tensor, new: Tensor | None) -> None:
        hooks = self._hooks
        if received.written(hooks.recorder.marks):
            self._report(grad)
        for result in (grad, new):
            if result is None:
                continue
            if not same(hooks.recorder.look(result), self._layout):
                self._report(result)
            elif hooks.taken.seen and not received.holds(result):
                self._report(result, hooks.taken.why())

    def _report(self, grad: Tensor, why: str = "") -> None:
        self._hooks.report("a tensor hook", grad, self._place, why)


def _is_tap(node: Any) -> bool:
    """Whether the recorder's own node stands in for an operator's."""
    return getattr(type(node), "_forward_cls", None) is Tap
