"""A user's hooks on tensors.

A hook gets a gradient marked with the layout of its tensor; what it returns must have that layout.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import LOOP, Place, Reason, here
from ...guards.extracted_numbers import ExtractedNumbers, Received
from ...layouts.layout import Layout
from ...uses.context import Context
from ...uses.tap import Tap
from ...uses.tensor_states import Derived, same

Hook = Callable[[Tensor], Tensor | None]


def report(context: Context, who: str, grad: Tensor, place: Place | None, why: str = "") -> None:
    """A gradient cannot be followed: the running pass is refused."""
    if context.backward.receiving or context.user_code.nested:
        why = why or f"{who} does not keep samples separate, or hides how"
        reason = Reason(who, why, (tuple(grad.shape),), place)
        context.backward.refuse(reason.error("gradients cannot be followed in backward", fix=LOOP))


def follow_hook(context: Context, numbers: ExtractedNumbers, tensor: Tensor, hook: Hook) -> Any:
    """A user's tensor hook that must keep samples separate while the recorder listens."""
    context.user_code.exposed = True
    state = context.look(tensor)
    if not isinstance(state, Layout):
        if isinstance(state, Derived) and tensor.grad_fn is not None:
            context.user_code.by_hand.append(tensor.grad_fn)
        return hook
    return FollowedHook(context, numbers, tensor, state, hook)


class FollowedHook:
    """A user's hook: marks the gradient that it is given, and checks what it makes of it."""

    def __init__(
        self, context: Context, numbers: ExtractedNumbers, tensor: Tensor, layout: Layout,
        hook: Hook,
    ) -> None:  # fmt: skip
        self._context, self._numbers = weakref.ref(context), weakref.ref(numbers)
        self._layout, self._hook, self._place = layout, hook, here()
        known = context.states.table.get(id(tensor))
        tapped = tensor.dim() > 2 and _is_tap(tensor.grad_fn)
        self._family = known.family if known is not None and tapped else None
        self._version = 0 if self._family is None else self._family.version

    def __call__(self, grad: Tensor) -> Tensor | None:
        """Run the hook."""
        context, numbers = self._context(), self._numbers()
        if context is None or numbers is None:
            return self._hook(grad)
        if not (context.backward.receiving or context.user_code.nested):
            return self._hook(grad)
        with torch._C.DisableTorchFunction():
            received = Received([grad])
            if self._family is not None and self._family.version != self._version:
                # without a recorder it may have been a view, and torch drops a view's hooks
                why = "its tensor was written to in place after it was registered"
                self._report(context, grad, why)
            context.states.put(grad, self._layout)
        numbers.running.append(received)
        try:
            new = self._hook(grad)
        finally:
            numbers.running.pop()
        with torch._C.DisableTorchFunction():
            self._check(context, numbers, received, grad, new)
        return new

    def _check(
        self, context: Context, numbers: ExtractedNumbers, received: Received, grad: Tensor,
        new: Tensor | None,
    ) -> None:  # fmt: skip
        if received.written(context.states):
            self._report(context, grad)
        for result in (grad, new):
            if result is None:
                continue
            if not same(context.look(result), self._layout):
                self._report(context, result)
            elif numbers.seen and not received.holds(result):
                self._report(context, result, numbers.why())

    def _report(self, context: Context, grad: Tensor, why: str = "") -> None:
        report(context, "a tensor hook", grad, self._place, why)


def _is_tap(node: Any) -> bool:
    """Whether the recorder's own node stands in for an operator's."""
    return getattr(type(node), "_forward_cls", None) is Tap
