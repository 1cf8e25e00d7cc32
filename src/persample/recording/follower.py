"""Follows the calls of a recording along what was learned of the model, and learns what is new.

A call that agrees with a learned step runs at once: its results have the states that the step
says, and a use is tapped as it was. A call that does not is handled in full, as if it were the
first of its kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks

from ..errors import here
from ..guards.guards import Guards
from ..layouts import Operator
from ..layouts.layout import Layout, State
from ..uses.context import Context
from ..uses.results import Known
from ..uses.signature import known as known_kind
from ..uses.use import Operand
from .program import (
    OfConstant,
    OfMark,
    OfParameter,
    Origin,
    Plain,
    Sequenced,
    Several,
    Step,
    Use,
    flat,
    plain,
    program_of,
)
from .roles import Roles
from .use_capture import repeat_use

MISSED = object()
_PLAIN_TYPES = (Tensor,)
_CLASSES = (Tensor, nn.Parameter)


class Follower:
    """Where a recording is in the program of its model."""

    def __init__(self, context: Context, guards: Guards, pending: list[Any]) -> None:
        self._context, self._guards, self._backward = context, guards, context.backward
        self._states, self._results = context.states, context.states.results
        self._marks = context.states.table
        self._pending = pending  # what a custom function may have read
        slots = context.parameters.slots
        self._slots = {where: k for k, where in enumerate(slots)}
        self._parameters = [slot.tensor for slot in slots.values()]
        options, processes = context.options, context.processes
        sharded = processes is not None and processes.sharded
        self._program = None if options.native or sharded else program_of(context.parameters.model)
        self._passing = False  # the call agreed with a step, but not its circumstances
        self._at: Step | None = None  # the last step that a call agreed with, or that was learned

    def clear(self) -> None:
        """Forget every tensor."""
        self._parameters.clear()
        self._at = self._program = None

    def _begin(self) -> Step | None:
        """The program begins where it is known how many samples there are."""
        context = self._context
        if self._program is None or context.n is None:
            return None
        names = tuple([slot.name for slot in context.parameters.slots.values()])
        options = context.options
        signature = context.n, options.lean, tuple(options.rules), names
        self._at = self._program.root(signature)
        return self._at

    # ------------------------------------------------------------------ calls that were learned

    def follow(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a call that agrees with what was learned; MISSED if none does."""
        at = self._at or self._begin()
        if at is None:
            return MISSED
        for step in at.following:
            if step.func is func:
                if self._is_elsewhere(types):
                    self._passing = True
                    return MISSED
                if step.only >= 0:
                    if len(args) != 1 or kwargs or not self._is_result(step.only, args[0]):
                        continue
                    out = func(*args)
                else:
                    values = flat(args, kwargs)
                    names = tuple(kwargs) if kwargs else ()
                    if step.names != names or not self._agree(step.origins, values):
                        continue
                    out = self._run(step, func, args, kwargs, values)
                    if out is MISSED:
                        self._passing = True
                        return MISSED
                self._at = step
                self._note(step, out, args)
                return out
        self._passing = False
        return MISSED

    def _is_elsewhere(self, types: Any) -> bool:
        """Whether the circumstances are not those of a step: no gradients, a backward pass, …"""
        backward = self._backward
        return bool(
            self._pending
            or backward.receiving
            or backward.muted
            or not torch.is_grad_enabled()
            or (types and types != _PLAIN_TYPES)
        )

    def _agree(self, origins: Sequence[Origin], values: Sequence[Any]) -> bool:
        """Whether every value comes from where it came from."""
        if len(origins) != len(values):
            return False
        for origin, value in zip(origins, values, strict=True):
            kind = origin.__class__
            if kind is int:
                if not self._is_result(origin, value):
                    return False
            elif kind is OfParameter:
                if not self._is_parameter(origin, value):
                    return False
            elif kind is Plain:
                if value.__class__ is not origin.kind or value != origin.value:
                    return False
            elif kind is Sequenced:
                if not origin.fits(value):
                    return False
            elif kind is Several:
                if value.__class__ is not origin.kind or not self._agree(origin.origins, value):
                    return False
            elif value.__class__ not in _CLASSES or not self._is_known(origin, value):
                return False
        return True

    def _is_result(self, index: int, value: Any) -> bool:
        """Whether a value is this result, and nobody wrote to it or gave it a history."""
        ref, version, known, _ = self._results.each[index]
        if ref() is not value or value._version != version:
            return False
        if value.requires_grad is not known.grad:
            return False
        return index >= self._results.marked or self._is_marked(value, known.state, known.batches)

    def _is_marked(self, value: Tensor, state: State, batches: int) -> bool:
        mark = self._marks.get(id(value))
        return (
            mark is not None
            and mark.state is state
            and mark.batches == batches
            and mark.unchanged(value)
        )

    def _is_parameter(self, origin: OfParameter, value: Any) -> bool:
        """Whether a value is this parameter, trainable as it was, and nothing else is known."""
        return (
            value is self._parameters[origin.slot]
            and value.requires_grad
            and value.shape == origin.shape
            and value.dtype is origin.dtype
            and id(value) not in self._marks
        )

    def _is_known(self, origin: OfMark | OfConstant, value: Tensor) -> bool:
        """Whether a tensor from elsewhere is like the one that the step was learned with."""
        if value.is_nested or value.shape != origin.shape or value.dtype is not origin.dtype:
            return False
        if origin.__class__ is OfMark:
            return value.requires_grad is origin.grad and self._is_marked(
                value, origin.state, origin.batches
            )
        if value.requires_grad or value.layout is not torch.strided:
            return False
        if id(value) in self._marks or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return False
        return self._context.look(value) is None

    def _run(self, step: Step, func: Any, args: Any, kwargs: Any, values: Sequence[Any]) -> Any:
        """Run a call; a use, on its parameters of today. MISSED where hooks keep its tensors."""
        use = step.use
        if use is not None and _top_saved_tensors_default_hooks(True) is not None:
            return MISSED
        if step.watched:
            pairs = zip(step.origins, values, strict=True)
            self._guards.constants_met(
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

    def _note(self, step: Step, out: Any, args: Any) -> None:
        """Write down what came out."""
        known, each = step.known, self._results.each
        source = weakref.ref(args[step.source]) if step.source >= 0 else None
        if known.__class__ is Known:
            each.append((weakref.ref(out), out._version, known, source))
        else:
            for tensor, one in zip(out, known, strict=True):
                each.append((weakref.ref(tensor), tensor._version, one, source))

    # ------------------------------------------------------------------ calls that are new

    def learn_data(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        roles: Roles, out: Any, states: Any,
    ) -> None:  # fmt: skip
        """A call on data was handled: learn it, if shapes and closed layouts decided all of it."""
        at = self._learning(operator, func, roles)
        if at is None or operator.name == "data" or "out" in kwargs:
            return
        outs = out if isinstance(out, (list, tuple)) else [out]
        states = states if states.__class__ is list else [states] * len(outs)
        if len(outs) != len(states):
            return
        if not all(t.__class__ is Tensor for t in outs) or not all(_closed(s) for s in states):
            return
        origins = self._origins(flat(args, kwargs))
        source = self._source(operator, args, roles)
        if origins is None or source is None:
            return
        batches = roles.all_batches()
        known = tuple(
            Known(
                state, batches, tensor.requires_grad,
                aliasing=operator.aliasing, detached=operator.name == "detach",
            )
            for tensor, state in zip(outs, states, strict=True)
        )  # fmt: skip
        watched = bool(roles.loose) and self._context.options.lean
        single = known if outs is out else known[0]
        step = Step(func, origins, tuple(kwargs), single, source, watched=watched)
        self._add(at, step, out, args)

    def learn_use(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        roles: Roles, out: Any,
    ) -> None:  # fmt: skip
        """A use was recorded: learn it, if its kind was learned."""
        at = self._learning(operator, func, roles)
        kind = known_kind(roles.key, operator.inplace, len(args))
        if at is None or kind is None or kind.single is None or out.__class__ is not Tensor:
            return
        if operator.recurrent or operator.random or _top_saved_tensors_default_hooks(True) is not None:
            return
        origins = self._origins(flat(args, kwargs))
        if origins is None or any(id(t) not in self._slots for t in roles.owned):
            return
        slots, values = self._context.parameters.slots, flat(args, kwargs)
        names = [slots[id(values[k])].name for k in kind.mine]
        known = Known(
            kind.single.layouts[0], roles.all_batches(), out.requires_grad,
            aliasing=False, detached=False,
        )  # fmt: skip
        use, watched = Use(operator, kind, names, here()), bool(roles.loose)
        self._add(at, Step(func, origins, tuple(kwargs), known, -1, use, watched=watched), out, args)

    def _learning(self, operator: Operator, func: Any, roles: Roles) -> Step | None:
        """After which step a call that was handled can be learned."""
        if roles.key is None or operator.inplace or self._backward.busy:
            return None
        if self._passing or not torch.is_grad_enabled():
            return None
        return self._at or self._begin()

    def _add(self, at: Step, step: Step, out: Any, args: Any) -> None:
        """A step was learned; its results have marks already."""
        assert self._program is not None
        self._program.add(at, step)
        self._at = step
        self._note(step, out, args)
        self._results.marked = len(self._results.each)

    def _origins(self, values: Sequence[Any]) -> tuple[Origin, ...] | None:
        """Where a call's values come from; None if one of them is of another kind."""
        found: list[Origin] = []
        for value in values:
            origin = self._origin(value)
            if origin is None:
                return None
            found.append(origin)
        return tuple(found)

    def _origin(self, value: Any) -> Origin | None:
        found = plain(value)
        if found is not None:
            return found
        if value.__class__ in (list, tuple):
            origins = self._origins(value)
            return None if origins is None else Several(value.__class__, origins)
        if value.__class__ not in _CLASSES:
            return None
        each = self._results.each
        for at in range(len(each) - 1, -1, -1):
            if each[at][0]() is value:
                return at if self._is_result(at, value) else None
        mark, where = self._marks.get(id(value)), self._slots.get(id(value))
        if where is not None:
            fits = mark is None and value.requires_grad
            return OfParameter(where, value) if fits else None
        if mark is None:
            loose = not value.requires_grad and value.layout is torch.strided
            loose = loose and not value.is_nested and self._context.look(value) is None
            return OfConstant(value) if loose else None
        fits = mark.unchanged(value) and _closed(mark.state)
        return OfMark(mark.state, mark.batches, value) if fits else None

    def _source(self, operator: Operator, args: Sequence[Any], roles: Roles) -> int | None:
        """The place of the argument that results may share memory with; None if it is hidden."""
        if not operator.aliasing:
            return -1
        first = roles.coloured[0][0]
        return next((k for k, value in enumerate(args) if value is first), None)


def _closed(state: Any) -> bool:
    return state.__class__ is Layout and state.ids is None and state.coupled is None
