"""Code of the user's own in backward: hooks on tensors, and nodes of custom functions.

A hook gets a gradient marked with the layout of its tensor; what it returns must have that layout.
A custom function's node: what it is given, and what it returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import LOOP, Place, Reason, here
from ...guards.extracted_numbers import ExtractedNumbers, Received
from ...layouts import Additive, Constant, Layout, State
from ...uses import Context, Derived, Tap, same
from .custom_parameters import OfParameters

Hook = Callable[[Tensor], Tensor | None]
Grads = tuple[Tensor | None, ...]


def report(who: str, place: Place | None, context: Context, grad: Tensor, why: str = "") -> None:
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
        self._layout, self._hook = layout, hook
        self._report = partial(report, "a tensor hook", here())
        known = context.states.table.get(id(tensor))
        # whether the recorder's own node stands in for an operator's
        tapped = tensor.dim() > 2 and getattr(type(tensor.grad_fn), "_forward_cls", None) is Tap
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


class Owner(Protocol):
    """The custom functions of a recording."""

    context: Context
    numbers: ExtractedNumbers
    pending: list[tuple[Tensor, Layout]]  # read without gradients


@dataclass(slots=True)
class Followed:
    """A custom node: the layouts of its results, and of its arguments by edge."""

    node: Any
    results: dict[int, State] = field(default_factory=dict)
    arguments: dict[int, Layout] = field(default_factory=dict)
    received: Received | None = None
    own: OfParameters | None = None


class FollowedBackward:
    """Marks the gradients that a node receives, and checks those that it returns."""

    def __init__(self, owner: Owner, followed: Followed, place: Place | None) -> None:
        node = followed.node
        self._owner, self._followed = weakref.ref(owner), followed
        self._report = partial(report, f"the backward of {node.name()}", place)
        self._edges = node.next_functions
        self._own = followed.own.edges if followed.own is not None else {}
        node.register_prehook(self._before)
        node.register_hook(self._after)

    def _before(self, grads: Grads) -> None:
        owner, followed = self._owner(), self._followed
        if owner is None:
            return
        context = owner.context
        with torch._C.DisableTorchFunction():
            followed.received = Received(grads)
            owner.numbers.running.append(followed.received)
            own = followed.own
            context.user_code.returning.append(own.parameters if own is not None else set())
            for k, grad in enumerate(grads):
                state = followed.results.get(k)
                if grad is not None and isinstance(state, Layout):
                    context.states.put(grad, state)
            if followed.own is not None and self._own and context.backward.receiving:
                why = followed.own.fire(grads, followed.results)
                given = [grad for grad in grads if grad is not None]
                if why and given:
                    self._report(context, given[0], why)
                if followed.own.stretched:
                    context.states.made = []

    def _after(self, found: Grads, outer: Grads) -> Grads | None:
        owner, followed = self._owner(), self._followed
        received, followed.received = followed.received, None
        if owner is None:
            return None
        context, numbers = owner.context, owner.numbers
        made, context.states.made = context.states.made, None
        if context.user_code.returning:
            context.user_code.returning.pop()
        with torch._C.DisableTorchFunction():
            if received is not None:
                if received in numbers.running:
                    numbers.running.remove(received)
                if received.written(context.states):
                    self._report(context, next(grad for grad in outer if grad is not None))
            for k, (grad, (into, _)) in enumerate(zip(found, self._edges, strict=True)):
                if into is None or grad is None:  # an argument that needs no gradient
                    continue
                if k in self._own:
                    self._check_own(context, k, grad, made or [])
                elif not self._apart(context, grad, followed.arguments.get(k)):
                    self._report(context, grad)
                if numbers.seen and not (received and received.holds(grad)):
                    self._report(context, grad, numbers.why())
        owner.pending.clear()  # what its backward read was saved by its forward: let it go
        if not self._own or not context.backward.receiving:
            return None
        return tuple(None if k in self._own else grad for k, grad in enumerate(found))

    def _check_own(self, context: Context, k: int, grad: Tensor, made: list[Tensor]) -> None:
        """Every term of a parameter's gradient must be of one sample; else others matter."""
        own, state = self._followed.own, context.look(grad)
        if state is None and own is not None:
            state = _summed(context, grad, own.stretched.get(own.edges[k]), made)
        if not context.n:
            return
        if isinstance(state, Constant | None) and not bool(grad.any()):  # it was not used
            state = Additive()
        if not isinstance(state, (Layout, Additive)) or state.coupled is not None:
            why = "its gradient of a parameter is no proven sum over samples"
            self._report(context, grad, why)
        elif own is not None and context.backward.receiving:
            if not own.adds_up(k, grad, context.backward.factor):
                why = "run for each sample alone, it does not add up to its own run"
                self._report(context, grad, why)

    def _apart(self, context: Context, grad: Tensor, expected: Layout | None) -> bool:
        state = context.look(grad)
        if isinstance(state, Layout):
            return expected is not None and same(state, expected)
        if state is not None:
            return not grad.numel()  # there are no samples
        if not bool(grad.any()):
            return True
        # a function that adds up over samples may give all elements the same gradient
        sums = all(isinstance(result, Additive) for result in self._followed.results.values())
        return sums and bool((grad == grad.flatten()[0]).all())


def _summed(context: Context, grad: Tensor, shape: torch.Size | None, made: list[Tensor]) -> Any:
    """What is known of a gradient that autograd summed to an argument's shape, unseen.

    The function made a tensor of this shape with that sum: its numbers are what counts.
    """
    for tensor in made:
        if tensor.shape == shape and tensor.dtype == grad.dtype:
            with torch._C._EnableTorchFunction(), context.mode:
                total = tensor.sum_to_size(grad.shape)
            if torch.equal(total, grad):
                return context.look(total)
    return None
