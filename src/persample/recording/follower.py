"""Follows the calls of a recording along what was learned of its model.

A call that agrees with a learned step runs at once: its results have the states that the step
says, and a use is tapped as it was. A call that does not is handled in full, as if it were the
first of its kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled, nn

from ..guards.guards import Guards
from ..layouts.layout import State
from ..uses.context import Context
from ..uses.results import Known
from ..uses.use import Operand
from .program import (
    Cursor,
    OfConstant,
    OfMark,
    OfParameter,
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
        self._user_code = context.user_code
        self._marks, self._cursor = context.states.table, cursor
        self._pending = pending  # what a custom function may have read

    def follow(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a call that agrees with what was learned; MISSED if none does."""
        cursor = self._cursor
        at = cursor.at or cursor.begin()
        if at is None:
            return MISSED
        backward = self._backward
        for step in at.following:
            if step.func is func:
                if (
                    self._pending
                    or backward.receiving
                    or backward.muted
                    or not is_grad_enabled()
                    or (step.use is not None and self._user_code.differentiable)
                    or is_inference_mode_enabled()
                    or (types and types != _PLAIN_TYPES)
                ):  # other circumstances than a step's
                    cursor.passing = True
                    return MISSED
                if step.only >= 0:
                    if len(args) != 1 or kwargs or not self._is_result(step.only, args[0]):
                        continue
                    out = func(*args)
                else:
                    values = (*args, *kwargs.values()) if kwargs else args
                    names = tuple(kwargs) if kwargs else ()
                    if step.names != names or not self.agree(step.origins, values):
                        continue
                    out = self._run(step, func, args, kwargs, values)
                cursor.at = step
                self.note(step, out, args)
                return out
        cursor.passing = False
        return MISSED

    def agree(self, origins: Sequence[Any], values: Sequence[Any]) -> bool:
        """Whether every value comes from where it came from."""
        if len(origins) != len(values):
            return False
        for origin, value in zip(origins, values, strict=True):
            kind = origin.__class__
            if kind is int:
                fits = self._is_result(origin, value)
            elif kind is OfParameter:
                fits = (
                    value is self._cursor.parameters[origin.slot]
                    and value.requires_grad
                    and value.shape == origin.shape
                    and value.dtype is origin.dtype
                    and id(value) not in self._marks
                )
            elif kind is Plain:
                fits = value.__class__ is origin.kind and value == origin.value
            elif kind is Sequenced:
                fits = origin.fits(value)
            elif kind is Several:
                fits = value.__class__ is origin.kind
                fits = fits and self.agree(origin.origins, value)
            else:
                fits = value.__class__ in CLASSES and self._is_known(origin, value)
            if not fits:
                return False
        return True

    def _is_result(self, index: int, value: Any) -> bool:
        """Whether a value is this result, and was not written to or given a history."""
        results = self._results
        ref, version, known, _ = results.each[index]
        found: Any = ref()
        if found is not value or found is None or found._version != version:
            return False
        if found.requires_grad is not known.grad:
            return False
        return index >= results.marked or self._is_marked(found, known.state, known.batches)

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

    def _run(self, step: Step, func: Any, args: Any, kwargs: Any, values: Sequence[Any]) -> Any:
        """Run a call; a use, on its parameters of today."""
        use = step.use
        if step.watched:
            pairs = zip(step.origins, values, strict=True)
            self._guards.constants_used(
                [value for origin, value in pairs if origin.__class__ is OfConstant], derived=False
            )
        if use is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        assert isinstance(step.known, Known)
        self._states.batches = step.known.batches
        leaves, operands = list(values), []
        for position, name in zip(use.kind.mine, use.names, strict=True):
            value = leaves[position]
            operands.append(
                Operand(position, value.detach(), name, None, value._version, id(value))
            )
        return repeat_use(self._context, use.operator, func, use.kind, leaves, operands, use.place)

    def note(self, step: Step, out: Any, args: Any) -> None:
        """Write down what came out."""
        known, results = step.known, self._results
        source = weakref.ref(args[step.source]) if step.source >= 0 else None
        if isinstance(known, Known):
            results.add((weakref.ref(out), out._version, known, source))
        else:
            for tensor, one in zip(out, known, strict=True):
                results.add((weakref.ref(tensor), tensor._version, one, source))
