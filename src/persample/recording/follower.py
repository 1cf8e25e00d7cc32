"""Follows the calls of a recording along what was learned of its model.

A call that agrees with a learned step runs at once: its results have the states that the step
says, and a use is tapped as it was. A call that does not is handled in full, as if it were the
first of its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled, nn

from ..guards.guards import Guards
from ..layouts.layout import State
from ..uses.context import Context
from ..uses.results import Known
from .program import (
    Cursor,
    OfConstant,
    OfMark,
    Origins,
    Plain,
    Sequenced,
    Several,
    Step,
)
from .use_capture import repeat_use

MISSED = object()
_PLAIN_TYPES = (Tensor,)
CLASSES = (Tensor, nn.Parameter)


class Follower:
    """Compares every call with the steps that may come next, and runs those that agree."""

    def __init__(
        self, context: Context, guards: Guards, cursor: Cursor, pending: Sequence[Any]
    ) -> None:
        self._context, self._guards, self._backward = context, guards, context.backward
        self._states, self._results = context.states, context.states.results
        self._marks, self._cursor = context.states.table, cursor
        self._pending = pending  # what a custom function may have read

    def follow(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a call that agrees with what was learned; MISSED if none does."""
        cursor = self._cursor
        at = cursor.at or cursor.begin()
        if at is None:
            return MISSED
        for step in at.following:
            if step.func is not func:
                continue
            backward = self._backward
            if (
                self._pending
                or backward.receiving
                or backward.muted
                or not is_grad_enabled()
                or is_inference_mode_enabled()
                or (types and types != _PLAIN_TYPES)
            ):  # other circumstances than a step's
                cursor.passing = True
                return MISSED
            values = args
            if kwargs:
                if step.names != tuple(kwargs):
                    continue
                values = (*args, *kwargs.values())
            elif step.names:
                continue
            if not self._agrees(step, values):
                continue
            if step.watched:
                self._guards.constants_used([values[k] for k in step.watched], derived=False)
            known = step.known
            if step.use is not None:
                out = repeat_use(self._context, step.use, func, values)
            else:
                out = func(*args, **kwargs) if kwargs else func(*args)
            cursor.at = step
            if step.source >= 0 or known.__class__ is not Known:
                self.note(step, out, args)
                return out
            results = self._results
            if not known.grad:
                results.plain.append(len(results.each))
            results.each.append((ref(out), out._version, known, None))
            return out
        cursor.passing = False
        return MISSED

    def _agrees(self, origins: Origins, values: Sequence[Any]) -> bool:
        """Whether every value comes from where it came from."""
        if origins.count != len(values):
            return False
        results = self._results
        each, marked = results.each, results.marked
        for place, index in origins.results:
            value = values[place]
            made, version, known, _ = each[index]
            if made() is not value or value is None or value._version != version:
                return False  # another one, or it was written to
            if value.requires_grad is not known.grad:
                return False
            if index < marked and not self._is_marked(value, known.state, known.batches):
                return False
        parameters, marks = self._cursor.parameters, self._marks
        for place, origin in origins.parameters:
            value = values[place]
            if (
                value is not parameters[origin.slot]
                or not value.requires_grad
                or value.shape != origin.shape
                or value.dtype is not origin.dtype
                or id(value) in marks
            ):
                return False
        for place, other in origins.others:  # noqa: SIM110  (a generator takes longer)
            if not self._fits(other, values[place]):
                return False
        return True

    def _fits(self, origin: Any, value: Any) -> bool:
        """Whether a value is like the one that the step was learned with."""
        kind = origin.__class__
        if kind is Plain:
            return value.__class__ is origin.kind and bool(value == origin.value)
        if kind is Sequenced:
            return bool(origin.fits(value))
        if kind is Several:
            return value.__class__ is origin.kind and self._agrees(origin, value)
        return value.__class__ in CLASSES and self._is_known(origin, value)

    def is_result(self, index: int, value: Tensor) -> bool:
        """Whether a value is this result, and was not written to or given a history."""
        return self._agrees(Origins((index,)), (value,))

    def _is_marked(self, value: Tensor, state: State, batches: int) -> bool:
        mark = self._marks.get(id(value))
        return (
            mark is not None
            and mark.state is state
            and mark.batches == batches
            and mark.unchanged(value)
        )

    def _is_known(self, origin: OfMark | OfConstant, value: Tensor) -> bool:
        """Whether a tensor from elsewhere is like the one that the step was learned with."""
        if value.is_nested or value.shape != origin.shape or value.dtype is not origin.dtype:
            return False
        if value.is_inference():  # it has no version
            return False
        if isinstance(origin, OfMark):
            return value.requires_grad is origin.grad and self._is_marked(
                value, origin.state, origin.batches
            )
        if value.requires_grad or value.layout is not torch.strided:
            return False
        if id(value) in self._marks or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return False
        return self._context.look(value) is None

    def note(self, step: Step, out: Any, args: Any) -> None:
        """Write down what came out."""
        known, results = step.known, self._results
        source = ref(args[step.source]) if step.source >= 0 else None
        if isinstance(known, Known):
            results.add((ref(out), out._version, known, source))
        else:
            for tensor, one in zip(out, known, strict=True):
                results.add((ref(tensor), tensor._version, one, source))
