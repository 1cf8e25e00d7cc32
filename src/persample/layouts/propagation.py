"""Apply a layout rule, and the algebra of states that are not layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import LOOP, Mixing, Reason, here
from .call import Call, Result, collect
from .couplings import (
    JOINS,
    READS,
    SAME,
    SORTS,
    Sums,
    beside_samples,
    counts_rows,
    coupling_after,
    regroup,
    taken_apart,
)
from .layout import NAME_IT, Additive, Coloured, Constant, Layout, Mixed, State, uncoupled
from .operator_facts import CHOOSES, LIKE
from .operators import Operator

_SCALES = frozenset(("mul", "multiply", "div", "divide", "true_divide"))
_SUMS = frozenset(("add", "sub", "subtract", "rsub"))
_FOLLOWED = READS | SORTS | SAME | _SUMS  # integers that are coupled are followed through these


def propagate(
    operator: Operator,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    coloured: Coloured,
    n: int,
) -> Result | list[Result]:
    """The state of every result of one call on data (parameters count as constants)."""
    states = [state for _, state in coloured]
    if n == 1 and not operator.constant and any(isinstance(s, Layout | Additive) for s in states):
        if not any(isinstance(s, Mixed) for s in states):
            return _of_one(out, 0)  # it interacts with no other, whatever the operator does
    layouts = uncoupled(coloured)
    plain = all(isinstance(s, Constant) or id(t) in layouts for t, s in coloured)
    call = Call(operator.name, func, args, kwargs, out, layouts, n)
    try:
        return _apply(operator, call) if plain else _special(operator, call, coloured)
    except Mixing as mixing:
        if _adds_numbers(operator, call):
            return _sum_of(coloured)
        alone = _alone(layouts) if plain and not operator.constant else None
        if alone is not None:
            return _of_one(out, alone)
        return Mixed(reason(operator, call, mixing))


def _alone(layouts: dict[int, Layout]) -> int | None:
    """The sample that all arguments belong to as a whole, like ``x[3]``."""
    ids = [layout.ids for layout in layouts.values() if layout.ids is not None]
    found = {sample for each in ids for sample in each.unique().tolist() if sample >= 0}
    return found.pop() if len(found) == 1 and len(ids) == len(layouts) else None


def _of_one(out: Any, sample: int) -> Result | list[Result]:
    """Every result belongs to one sample."""
    return [
        Layout(0, 1, torch.full((1,) * t.dim(), sample, dtype=torch.long, device=t.device))
        for t in collect(out)
    ]


def reason(operator: Operator, call: Call, mixing: Mixing) -> Reason:
    """Where and why the samples were lost."""
    tensors = call.tensors()
    shapes = tuple(tuple(t.shape) for t in tensors)
    real = any(t.is_floating_point() or t.is_complex() for t in tensors)
    fix = mixing.fix
    if fix is NAME_IT and all(t.requires_grad for t in tensors if call.layout(t) is not None):
        fix = ""  # what was computed with parameters is no input of the wrong kind
    return Reason(operator.name, mixing.why, shapes, here(), fix, real)


def _apply(operator: Operator, call: Call) -> Result | list[Result]:
    if not call.layouts:
        return None
    if operator.rule is None:
        raise Mixing(f"persample has no layout rule for {operator.name}", LOOP)
    try:
        return _fitting(operator.rule(call), call)
    except Mixing:
        raise
    except Exception as error:  # a rule that cannot cope proves nothing
        raise Mixing(
            f"the layout rule of {operator.name} could not follow this call "
            f"({type(error).__name__}: {error})"
        ) from error


def _fitting(result: Result | list[Result], call: Call) -> Result | list[Result]:
    """The same, if ids can be expanded to the results they are of."""
    outs = collect(call.out)
    each = result if isinstance(result, list) else [result] * len(outs)
    for out, state in zip(outs, each, strict=False):
        if isinstance(state, Layout) and state.ids is not None:
            pairs = zip(state.ids.shape, out.shape, strict=False)
            if state.ids.dim() != out.dim() or any(a not in (1, b) for a, b in pairs):
                raise Mixing(f"{call.name}: an axis that holds samples changes its size")
    return result


def _special(operator: Operator, call: Call, coloured: Coloured) -> Result | list[Result]:
    """Some argument is mixed, a sum over samples, or coupled to the whole batch."""
    live: Coloured = []
    chosen: Coloured = []
    unread = _branch_not_taken(call) if operator.name == "where" else None
    for tensor, state in coloured:
        if isinstance(state, Constant) or _is_size(operator, call, tensor) or tensor is unread:
            continue
        real = tensor.is_floating_point() or tensor.is_complex()
        if not real and isinstance(state, Layout) and state.coupled is not None:
            state = state if operator.name in _FOLLOWED else Mixed(state.coupled)
        if operator.routes and not isinstance(state, Layout) and not tensor.requires_grad:
            table = operator.name in READS  # of the whole batch
            index = operator.constant or table or not (call.args and tensor is call.args[0])
            if index and not real:
                chosen.append((tensor, state))  # an index: what it chooses is read off its values
                continue
        live.append((tensor, state))
    if all(isinstance(state, Layout) and state.coupled is None for _, state in live):
        if chosen and not live and not operator.constant:  # constants, by the whole batch
            return Mixed(_first_reason(chosen, operator, call))
        if chosen and operator.name in CHOOSES:
            return _propagate_coupled(operator, call, live, _first_reason(chosen, operator, call))
        return _apply(operator, call)
    if operator.name in _SCALES:
        return _scale_by_batch(operator, call, live)
    if operator.name in SORTS and isinstance(live[0][1], Layout):
        found = regroup(call, live[0][0], live[0][1])
        if found is not None:
            return found
    if not operator.linear or any(isinstance(state, Mixed) for _, state in live):
        return Mixed(_first_reason(live, operator, call))
    if all(isinstance(state, Additive) for _, state in live):
        return _sum_of(live)
    if all(isinstance(state, Layout) for _, state in live):
        why = _first_reason(chosen, operator, call) if chosen else None
        return _propagate_coupled(operator, call, live, why)
    if _adds_numbers(operator, call):
        return _sum_of(live)
    why = _first_reason(live, operator, call)
    joined = None
    if operator.name in JOINS and not call.out.requires_grad:  # in backward: no losses
        joined = beside_samples(live, why, call.n)
    return Mixed(why) if joined is None else _propagate_coupled(operator, call, joined, None)


def _adds_numbers(operator: Operator, call: Call) -> bool:
    """``total = total + loss``: numbers of single samples, or sums of such, are added up."""
    return operator.name in _SUMS and isinstance(call.out, Tensor) and call.out.dim() == 0


def _sum_of(live: Coloured) -> Additive:
    return Additive(next((_why(state) for _, state in live if _why(state)), None))


def _is_size(operator: Operator, call: Call, tensor: Tensor) -> bool:
    """Whether a result takes a number for its shape from a tensor: like ``int(tensor)``."""
    if operator.name in LIKE and call.args and tensor is call.args[0]:
        return sum(tensor is each for each in call.tensors()) == 1
    shapes = operator.name == "one_hot" or (operator.aliasing and operator.name not in CHOOSES)
    if not shapes or tensor.dim() > 0:
        return False
    number = not (tensor.is_floating_point() or tensor.is_complex())
    return number and not (call.args and tensor is call.args[0])


def _branch_not_taken(call: Call) -> Tensor | None:
    """What ``where`` is given and takes no element of, because of the condition's values.

    A sample's elements then depend on its condition, and on the other branch.
    """
    if len(call.args) != 3 or not all(isinstance(given, Tensor) for given in call.args):
        return None
    condition, first, second = call.args
    unread: Tensor = second if bool(condition.all()) else first
    taken = first if unread is second else second
    if unread is first and bool(condition.any()):
        return None
    return None if unread.requires_grad or unread is taken or unread is condition else unread


def _why(state: State) -> Reason | None:
    """Why a state is mixed, or coupled to the whole batch."""
    if isinstance(state, Mixed):
        return state.reason
    return state.coupled if isinstance(state, (Layout, Additive)) else None


def _first_reason(live: Coloured, operator: Operator, call: Call) -> Reason:
    found = [why for _, state in live if (why := _why(state)) is not None]
    again = "a sum over samples is used again, so that samples influence each other"
    return found[0] if found else reason(operator, call, Mixing(again))


def _scale_by_batch(operator: Operator, call: Call, live: Coloured) -> Result | list[Result]:
    """A product or quotient: per-sample values may be scaled by a number of the whole batch."""
    mixed = Mixed(_first_reason(live, operator, call))
    below = None if operator.name in ("mul", "multiply") else call.arg(1, "other")
    layered = [pair for pair in live if isinstance(pair[1], Layout)]
    grads = [pair for pair in live if pair[0].requires_grad]
    first = (grads or layered or live)[0]
    main, state = first
    numbers = [p[0] for p in live if p is not first and not isinstance(p[1], Layout)]
    sums = any(isinstance(_why(s), Sums) for _, s in live)
    if (
        isinstance(state, Mixed)
        or len(grads) > 1
        or (main is below and (grads or sums or not isinstance(state, Layout)))
        or (sums and len(live) > 1)  # no longer a sum over samples
        or any(t.numel() != 1 for t in numbers)
        or (isinstance(state, Additive) and layered)
    ):
        return mixed
    if isinstance(state, Additive):
        return Additive(mixed.reason if numbers else state.coupled)
    return _propagate_coupled(operator, call, layered, mixed.reason if numbers else None)


def _propagate_coupled(
    operator: Operator, call: Call, live: Coloured, why: Reason | None
) -> Result | list[Result]:
    """The rule on plain layouts, and the memory that values depend on the whole batch."""
    layouts = dict(call.layouts)
    held = [(t, s) for t, s in live if isinstance(s, Layout) and s.coupled is not None]
    layouts.update((id(tensor), layout.plain()) for tensor, layout in held)
    inner = Call(call.name, call.func, call.args, call.kwargs, call.out, layouts, call.n)
    result = _apply(operator, inner)
    joined = [isinstance(layout.coupled, Sums) for _, layout in held]
    if any(joined) and (why is not None or not all(joined)):
        raise Mixing("sums over samples are read, or scaled, by numbers of the whole batch")
    if held and why is None:
        why = coupling_after(call, held)
    if isinstance(result, list):
        return [_tag(r, why, call.n) for r in result]
    if (
        operator.name in _SUMS
        and isinstance(result, Layout)
        and counts_rows(call.out, result, call.n)
    ):
        return result
    return _tag(result, why, call.n)


def _tag(state: Result, why: Reason | None, n: int) -> Result:
    if isinstance(why, Sums):
        return taken_apart(state, why, n)
    if isinstance(state, Layout):
        return state.with_coupling(why)
    return Additive(why) if isinstance(state, Additive) else state
