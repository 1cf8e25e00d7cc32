"""Learns calls that were handled in full, where shapes and closed layouts decide all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..errors import here
from ..layouts import (
    ZEROS,
    Additive,
    Layout,
    Operator,
    Rows,
    collect,
    common_rows,
    explicit_rows,
    shapes_of_ids,
    viewed,
)
from ..uses import EXCLUDED, SELECTED, Context, Derived, Kind, Known
from .follower import CLASSES, Follower
from .program import (
    ROWS,
    Cursor,
    OfConstant,
    OfMark,
    OfParameter,
    OfRows,
    Origin,
    Several,
    Step,
    UsePlan,
    flat,
    plain,
)
from .roles import Roles


class Learner:
    """Adds steps to the program of a recording's model."""

    def __init__(self, context: Context, cursor: Cursor, follower: Follower) -> None:
        self._context, self._cursor, self._follower = context, cursor, follower
        self._results, self._marks = context.states.results, context.states.table

    def data(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        roles: Roles, out: Any, states: Any,
    ) -> None:  # fmt: skip
        """A call on data was handled: learn it, if shapes and closed layouts decided all of it."""
        at = self._learning(operator)
        if at is None or operator.name == "data" or "out" in kwargs:
            return
        if not roles.closed:
            self._rows(at, operator, func, args, kwargs, roles, out)
            return
        outs = out if isinstance(out, (list, tuple)) else [out]
        states = states if states.__class__ is list else [states] * len(outs)
        sums = operator.name not in ZEROS  # where a sum is none by its values, these are looked at
        if len(outs) != len(states) or not all(_closed(s) or (sums and _is_sum(s)) for s in states):
            return
        if not all(t.__class__ is Tensor for t in outs):
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
        watched = bool(roles.loose) and self._context.options.lean and torch.is_grad_enabled()
        if watched and any(isinstance(origin, Several) for origin in origins):
            return
        single = known if outs is out else known[0]
        mode = self._follower.mode_of(func)
        step = Step(func, origins, tuple(kwargs), single, source, mode=mode, watched=watched)
        self._add(at, step, out, args)

    def use(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        roles: Roles, out: Any, kind: Kind,
    ) -> None:  # fmt: skip
        """A use was recorded: learn it, if shapes and closed layouts decided all of it."""
        at, mark = self._learning(operator), self._marks.get(id(out))
        state: Any = None if mark is None else mark.state
        shapes: Sequence[torch.Size] = ()
        if at is None or mark is None or out.__class__ is not Tensor:
            return
        if not roles.closed:
            kept = self._kept_rows(operator, func, args, kwargs, roles, out)
            rows, shapes = kept or (None, ())
            if rows is None or shapes != [rows.ids.shape] or not rows.owned:
                return
            kind, state, mark.state = kind.of_rows(ROWS), ROWS, rows
        elif not _closed(state):
            return
        if operator.random or kind.template.spec is not None:
            return
        wanted = any(self._context.is_selected(tensor) for tensor in roles.owned)
        if self._context.user_code.differentiable or (wanted and kind.single is None):
            return
        values = flat(args, kwargs)
        origins = self._origins(values)
        if origins is None:
            return
        slots, rules, mine = self._context.parameters.slots, self._context.options.rules, []
        for k in kind.mine:
            name = slots.get(id(values[k]))
            mine.append((k, name or None, name is None))
        known = Known(state, roles.all_batches(), out.requires_grad, aliasing=False, detached=False)
        use = UsePlan(
            operator, kind, mine, kind.constants(values), here(), known.batches,
            additive=operator.additive and operator.name not in rules,
            wanted=wanted,
        )  # fmt: skip
        step = Step(
            func, origins, tuple(kwargs), known, -1, use, mode=self._follower.mode_of(func),
            watched=bool(roles.loose), rows=shapes,
        )  # fmt: skip
        self._add(at, step, out, args)

    def _rows(
        self, at: Step, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        roles: Roles, out: Any,
    ) -> None:  # fmt: skip
        """A call on samples by explicit ids was handled: learn it, if no row leaves its place."""
        kept = self._kept_rows(operator, func, args, kwargs, roles, out)
        if kept is None or (roles.loose and self._context.options.lean):
            return
        (rows, shapes), outs = kept, collect(out)
        for tensor, shape in zip(outs, shapes, strict=True):
            self._marks[id(tensor)].state = viewed(rows, shape)
        origins, source = self._origins(flat(args, kwargs)), self._source(operator, args, roles)
        if origins is None or source is None:
            return
        known = Known(
            ROWS, roles.all_batches(), outs[0].requires_grad,
            aliasing=operator.aliasing, detached=operator.name == "detach",
        )  # fmt: skip
        mode = self._follower.mode_of(func)
        step = Step(func, origins, tuple(kwargs), known, source, mode=mode, rows=shapes)
        self._add(at, step, out, args)

    def _kept_rows(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        roles: Roles, out: Any,
    ) -> tuple[Rows, list[torch.Size]] | None:  # fmt: skip
        """The explicit ids that all data of a call have, and their shapes in its results."""
        rows, outs = common_rows(roles.coloured), collect(out)
        if rows is None or not roles.decided_by_shape(operator) or not all(map(_is_plain, outs)):
            return None
        numbers = any(t.dim() == 0 and not t.is_floating_point() for t in roles.loose)
        if numbers or (self._context.n or 0) < 2:
            return None
        shapes = shapes_of_ids(operator, func, args, kwargs, out, roles.coloured, rows)
        return None if shapes is None else (rows, shapes)

    def derived(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        roles: Roles, out: Any,
    ) -> None:  # fmt: skip
        """A call on parameters alone was handled: learn it, if its result is nothing but theirs."""
        at = self._learning(operator) if torch.is_grad_enabled() else None
        if at is None or operator.random or roles.loose or roles.coloured or "out" in kwargs:
            return
        first = roles.owned[0]
        if not args or args[0] is not first or not _is_plain(out) or not out.requires_grad:
            return
        state = SELECTED if self._context.is_selected(out) else EXCLUDED
        if out is not first:
            mark = self._marks.get(id(out))
            if mark is None or mark.state is not state or id(out) in self._follower.repeated:
                return
        origins = self._origins(flat(args, kwargs))
        if origins is None:
            return
        known = Known(
            state, roles.all_batches(), True,
            aliasing=operator.aliasing, detached=operator.name == "detach",
        )  # fmt: skip
        mode = self._follower.mode_of(func)
        step = Step(func, origins, tuple(kwargs), known, 0, mode=mode, derived=True)
        self._add(at, step, out, args)

    def _learning(self, operator: Operator) -> Step | None:
        """After which step a call that was handled can be learned."""
        if operator.inplace or self._context.backward.busy:
            return None
        # tensors of inference have no versions
        if self._cursor.passing or torch.is_inference_mode_enabled():
            return None
        return self._cursor.at or self._cursor.begin()

    def _add(self, at: Step, step: Step, out: Any, args: Any) -> None:
        """A step was learned; its results have marks already."""
        self._context.states.settle()  # calls inside this one may have been repeated
        self._cursor.add(at, step)
        if not step.rows:
            self._follower.note(step, out, args)
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
        if value.__class__ not in CLASSES or value.is_inference() or value.is_nested:
            return None
        each = self._results.each
        for at in range(len(each) - 1, -1, -1):
            if each[at][0]() is value:
                if self._follower.is_result(at, value):
                    return at
                break  # a custom function's result since, perhaps
        mark, where = self._marks.get(id(value)), self._cursor.place(value)
        if where is not None:
            fits = mark is None and value.requires_grad
            return OfParameter(where, value) if fits else None
        if mark is None:
            loose = not value.requires_grad and _is_plain(value)
            loose = loose and self._context.look(value) is None
            return OfConstant(value) if loose else None
        state = mark.state
        rows = explicit_rows(state)
        if rows is not None:
            fits = mark.unchanged(value) and _is_plain(value)
            return OfRows(rows.ids.shape, mark.batches, value) if fits else None
        if isinstance(state, Derived):  # which rows of a table it holds makes no difference
            state = SELECTED if state.selected else EXCLUDED
        elif not _closed(state):
            return None
        marked = OfMark(state, mark.batches, value)
        return marked if self._follower.is_known(marked, value) else None

    def _source(self, operator: Operator, args: Sequence[Any], roles: Roles) -> int | None:
        """The place of the argument that results may share memory with; None if it is hidden."""
        if not operator.aliasing:
            return -1
        first = roles.coloured[0][0]
        return next((k for k, value in enumerate(args) if value is first), None)


def _closed(state: Any) -> TypeGuard[Layout]:
    return state.__class__ is Layout and state.ids is None and state.coupled is None


def _is_plain(value: Any) -> bool:
    return value.__class__ in CLASSES and value.layout is torch.strided and not value.is_nested


def _is_sum(state: Any) -> bool:
    return state.__class__ is Additive and state.coupled is None
