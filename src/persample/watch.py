"""A custom function's node in backward: what it is given, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import Place
from .functions import OfParameters
from .layout import Additive, Layout, State
from .marks import same
from .taken import Received

if TYPE_CHECKING:
    from .custom import CustomFunctions

Grads = tuple[Tensor | None, ...]


@dataclass(slots=True)
class Followed:
    """A custom node: the layouts of its results, and of its arguments by edge."""

    node: Any
    results: dict[int, State] = field(default_factory=dict)
    arguments: dict[int, Layout] = field(default_factory=dict)
    received: Received | None = None
    own: OfParameters | None = None


class Watch:
    """Marks the gradients that a node receives, and judges those that it returns."""

    def __init__(self, custom: CustomFunctions, followed: Followed, place: Place | None) -> None:
        node = followed.node
        self._custom, self._followed, self._place = custom, followed, place
        self._who = f"the backward of {node.name()}"
        self._edges = node.next_functions
        self._own = followed.own.edges if followed.own is not None else {}
        node.register_prehook(self._before)
        node.register_hook(self._after)

    def _before(self, grads: Grads) -> None:
        custom, followed = self._custom, self._followed
        with torch._C.DisableTorchFunction():
            followed.received = Received(grads)
            custom.taken.running.append(followed.received)
            for k, grad in enumerate(grads):
                state = followed.results.get(k)
                if grad is not None and isinstance(state, Layout):
                    custom.recorder.marks.put(grad, state)
            if followed.own is not None and self._own and custom.receiving():
                why = followed.own.fire(grads, followed.results)
                given = [grad for grad in grads if grad is not None]
                if why and given:
                    self._report(given[0], why)

    def _after(self, found: Grads, outer: Grads) -> Grads | None:
        custom, followed = self._custom, self._followed
        received, followed.received = followed.received, None
        with torch._C.DisableTorchFunction():
            if received is not None:
                if received in custom.taken.running:
                    custom.taken.running.remove(received)
                if received.written(custom.recorder.marks):
                    self._report(next(grad for grad in outer if grad is not None))
            for k, (grad, (into, _)) in enumerate(zip(found, self._edges, strict=True)):
                if into is None or grad is None:  # an argument that needs no gradient
                    continue
                if k in self._own:
                    self._judge_own(k, grad)
                elif not self._apart(grad, followed.arguments.get(k)):
                    self._report(grad)
                elif custom.taken.seen and not (received and received.holds(grad)):
                    self._report(grad, custom.taken.why())
        custom.forget_read()  # what its backward read was saved by its forward: let it go
        if not self._own or not custom.receiving():
            return None
        return tuple(None if k in self._own else grad for k, grad in enumerate(found))

    def _judge_own(self, k: int, grad: Tensor) -> None:
        """Every term of a parameter's gradient must be of one sample; else others matter."""
        custom, own = self._custom, self._followed.own
        state = custom.recorder.look(grad)
        if not isinstance(state, (Layout, Additive)) or state.coupled is not None:
            self._report(grad, "its gradient of a parameter is no proven sum over samples")
        elif own is not None and custom.receiving():
            if not own.adds_up(k, grad, custom.recorder.tape._ledger.factor):
                self._report(grad, "run for each sample alone, it does not add up to its own run")

    def _apart(self, grad: Tensor, expected: Layout | None) -> bool:
        state = self._custom.recorder.look(grad)
        if isinstance(state, Layout):
            return expected is not None and same(state, expected)
        if state is not None:
            return False
        if not bool(grad.any()):
            return True
        # a function that adds up over samples may give all elements the same gradient
        sums = all(isinstance(result, Additive) for result in self._followed.results.values())
        return sums and bool((grad == grad.flatten()[0]).all())

    def _report(self, grad: Tensor, why: str = "") -> None:
        self._custom.report(self._who, grad, self._place, why)
