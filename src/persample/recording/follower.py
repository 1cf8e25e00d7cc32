"""Follows the calls of a recording along what was learned of its model.

A call that agrees with a learned step runs at once: its results have the states that the step
says, and a use is tapped as it was. A call that does not is handled in full, as if it were the
first of its kind.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled, nn

from ..guards.guards import Guards
from ..layouts import Rows, State, collect, explicit_rows, viewed
from ..uses import Context, Derived, Known
from .program import (
    Cursor,
    OfConstant,
    OfMark,
    OfRows,
    Origins,
    Plain,
    Sequenced,
    Several,
    Step,
)
from .use_capture import repeat_use
from .user_code.custom_functions import CustomFunctions

MISSED = object()
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
CLASSES = (Tensor, nn.Parameter)
_PLAIN_TYPES = ((Tensor,), (nn.Parameter,), CLASSES, CLASSES[::-1])


class Follower:
    """Compares every call with the steps that may come next, and runs those that agree."""

    def __init__(
        self, context: Context, guards: Guards, cursor: Cursor, custom: CustomFunctions,
        repeated: Container[int], entering: Container[Any],
    ) -> None:  # fmt: skip
        self._context, self._guards, self._backward = context, guards, context.backward
        self._states, self._results = context.states, context.states.results
        self._user_code = context.user_code
        self._marks, self._cursor = context.states.table, cursor
        self._custom, self._pending = custom, custom.pending  # what a function may have read
        self.repeated = repeated  # ids of parameters that are repeated for every sample
        self.entering = entering  # Python functions whose bodies run
        self._rows: Rows | None = None  # explicit ids, which all rows of a call must have

    def follow(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a call that agrees with what was learned; MISSED if none does."""
        cursor = self._cursor
        at = cursor.at or cursor.begin()
        if at is None:
            return MISSED
        backward, grad, entering = self._backward, is_grad_enabled(), self.entering
        if (
            backward.receiving
            or backward.muted
            or is_inference_mode_enabled()
            or (types and types not in _PLAIN_TYPES)
        ):  # other circumstances than a step's
            cursor.passing = True
            return MISSED
        mode = self.mode_of(func) if entering else grad
        for step in at.following:
            if step.mode != mode or (step.func is not func and step.func != func):
                continue  # an attribute is made anew each time
            if self._pending and grad and not self._custom.left_by(args, kwargs):
                break
            if step.careful and self._hindered(step):
                cursor.passing = True
                return MISSED
            if step.only >= 0:
                if len(args) != 1 or kwargs or not self.is_result(step.only, args[0]):
                    continue
                out = func(*args)
            else:
                out = self._run(step, func, args, kwargs)
                if out is MISSED:
                    continue
            cursor.at = step
            if not grad:
                self._custom.read_by(args, kwargs)
            if step.rows:
                self._mark_rows(step, out, args)
            else:
                self.note(step, out, args)
            return out
        cursor.passing = False
        return MISSED

    def mode_of(self, func: Any) -> int:
        """How a function is called now, as ``Step.mode`` counts it."""
        return is_grad_enabled() + 2 * (func in self.entering)

    def _run(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call if its values agree."""
        values, rows = (*args, *kwargs.values()) if kwargs else args, None
        self._rows = None
        if step.names != (tuple(kwargs) if kwargs else ()) or not self._agrees(step, values):
            return MISSED
        if step.rows:
            rows = self._rows
            if rows is None or (step.use is not None and not rows.owned):  # assigned by values
                return MISSED
        if step.watched:
            self._guards.constants_used([values[k] for k in step.watched], derived=False)
        if step.use is not None:
            return repeat_use(self._context, step.use, func, values, rows)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _hindered(self, step: Step) -> bool:
        """Whether a call that agrees has to be handled in full."""
        if step.use is not None:
            return self._user_code.differentiable
        return _top_hooks(True) is not None  # what parameters alone give is kept without them

    def _agrees(self, origins: Origins, values: Sequence[Any]) -> bool:
        """Whether every value comes from where it came from."""
        if origins.count != len(values):
            return False
        for place, index in origins.results:
            if not self.is_result(index, values[place]):
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
        if kind is OfRows:
            return value.__class__ in CLASSES and self._in_rows(origin, value)
        return value.__class__ in CLASSES and self.is_known(origin, value)

    def _in_rows(self, origin: OfRows, value: Tensor) -> bool:
        """Whether the rows of a tensor are samples' by the ids that all rows of the call have."""
        if value.is_nested or value.shape != origin.shape or value.dtype is not origin.dtype:
            return False
        if value.requires_grad is not origin.grad or value.layout is not torch.strided:
            return False
        mark = self._marks.get(id(value))
        if mark is None or mark.batches != origin.batches or not mark.unchanged(value):
            return False
        rows = explicit_rows(mark.state)
        if rows is None or rows.ids.shape != origin.ids:
            return False
        self._rows = self._rows or rows
        return self._rows.ids is rows.ids

    def _mark_rows(self, step: Step, out: Any, args: Any) -> None:
        states, known, rows = self._states, step.known, self._rows
        assert isinstance(known, Known)
        assert rows is not None
        states.batches, like = known.batches, None
        for tensor, shape in zip(collect(out), step.rows, strict=True):
            if known.aliasing:
                like = states.relative(tensor, args[step.source], detached=known.detached)
            states.put(tensor, viewed(rows, shape), like)

    def is_result(self, index: int, value: Tensor) -> bool:
        """Whether a value is this result, and was not written to or given a history."""
        results = self._results
        made, version, known, _ = results.each[index]
        if made() is not value or value is None or value._version != version:
            return False
        if value.requires_grad is not known.grad:
            return False
        return index >= results.marked or self._is_marked(value, known.state, known.batches)

    def _is_marked(self, value: Tensor, state: State | Derived, batches: int) -> bool:
        mark = self._marks.get(id(value))
        if value.requires_grad if mark is None else not mark.unchanged(value):
            self._context.look(value)  # a custom function's result, perhaps
            mark = self._marks.get(id(value))
        return (
            mark is not None
            and (mark.state is state or _alike(mark.state, state))
            and mark.batches == batches
            and mark.unchanged(value)
        )

    def is_known(self, origin: OfMark | OfConstant, value: Tensor) -> bool:
        """Whether a tensor from elsewhere is like the one that the step was learned with."""
        if value.is_nested or value.shape != origin.shape or value.dtype is not origin.dtype:
            return False
        if value.is_inference():  # it has no version
            return False
        if isinstance(origin, OfMark):
            return (
                value.requires_grad is origin.grad
                and id(value) not in self.repeated
                and self._is_marked(value, origin.state, origin.batches)
            )
        if value.requires_grad or value.layout is not torch.strided:
            return False
        if id(value) in self._marks or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return False
        return self._context.look(value) is None

    def note(self, step: Step, out: Any, args: Any) -> None:
        """Write down what came out."""
        known, results = step.known, self._results
        if step.derived and out is args[step.source]:  # to() may return its argument
            results.each.append((_nothing, 0, cast(Known, known), None))
            return
        source = ref(args[step.source]) if step.source >= 0 else None
        if isinstance(known, Known):
            if not known.grad:
                results.plain.append(len(results.each))
            results.each.append((ref(out), out._version, known, source))
        else:
            for tensor, one in zip(out, known, strict=True):
                results.add((ref(tensor), tensor._version, one, source))


def _nothing() -> None:
    """Stands for a result that was there before: those behind it keep their places."""


def _alike(one: Any, other: Any) -> bool:
    """Whether two tensors are derived from parameters, recorded or not."""
    both = isinstance(one, Derived) and isinstance(other, Derived)
    return both and one.selected is other.selected
