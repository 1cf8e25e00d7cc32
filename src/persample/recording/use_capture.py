"""A parameter is used with data: run the operator, remember the use, have its results tapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled
from torch.autograd import forward_ad

from ..errors import Reason, here
from ..layouts import CONSTANT, Constant, Layout, Mixed, Operator, assign_owners, propagate
from ..run_state import RandomState, current_autocast
from ..uses import Context, Derived, Kind, Operand, Use, same, taken_apart
from .program import UsePlan
from .recurrent import CELLS, cell, request, unroll
from .roles import Coloured, Roles, operand_of
from .tapping import tap, tap_single


def capture_use(
    context: Context, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
    roles: Roles, by_zeros: Callable[..., Layout | None],
) -> tuple[Any, Kind | None]:  # fmt: skip
    """One use, and of what kind it is; None where it became several, or values decided.

    The native operator runs on the detached parameter (unless the graph is wanted).
    """
    native = context.options.native
    again = context.user_code.differentiable and not context.options.loop
    if operator.recurrent and not (native or again):
        found = _stepwise(context, operator.name, args, kwargs)
        if found is not None:
            return found, None
    leaves, kind = _kind(operator, args, kwargs, roles)
    operands = [operand_of(context, k, leaves[k]) for k in kind.mine]
    closed = again and _may_be_differentiated(operator, operands, leaves, kind)
    target = leaves[0] if operator.inplace else None
    saved = (_data_and_graph if closed else _kept_data)(context, operator, leaves, kind)
    constants = kind.constants(leaves)
    if not native:
        for operand in operands:
            leaves[operand.position] = operand.value
    if target is not None:  # run on a copy, give the target its value and history afterwards
        leaves[0] = copy = leaves[0].clone()
        roles.coloured = [(copy if t is target else t, s) for t, s in roles.coloured]
    device = roles.owned[0].device
    random = RandomState(device) if operator.random else None
    call_args, call_kwargs = kind.template.call(leaves)
    with torch.set_grad_enabled(not closed):
        out = func(*call_args, **call_kwargs)
    _forget_values(context, operator, operands)
    result = out if target is None else leaves[0]
    use = Use(context.ref, kind, func, constants, operands, here(3), context.states.batches)
    use.rng = random if random is not None and random.changed() else None
    use.autocast = current_autocast(device)
    use.closed = closed
    states = propagate(
        operator, func, call_args, call_kwargs, result, roles.coloured, context.n or 0
    )
    read = by_zeros(operator, args, kwargs, result, roles, states)
    states, use.guessed = _settled(context, operator, read or states, result)
    kind.alone = not (native or closed or context.options.rules) and _is_alone(
        kind, operands, leaves, result, states
    )
    followed = tap(context, operator, use, result, states, saved)
    if target is not None:
        return _write_back(context, target, followed), kind
    return followed, None if read else kind


def _is_alone(kind: Kind, operands: list[Operand], leaves: list[Any], out: Any, state: Any) -> bool:
    """Whether a linear layer takes recorded parameters as they are, and each row is a sample's."""
    if kind.operator != "linear" or kind.data != [0] or not kind.template.simple:
        return False
    if state.__class__ is not Layout or state.ids is not None or state.coupled is not None:
        return False
    usual = kind.layouts == [state] and (state.axis, state.inner) == (0, 1)
    named = all(operand.name is not None for operand in operands)
    shift = leaves[2] if len(leaves) > 2 else None
    return usual and named and (shift is None or shift.shape == out.shape[-1:])


def repeat_use(
    context: Context, plan: UsePlan, func: Any, values: Sequence[Any], rows: Layout | None
) -> Tensor:
    """A use that was learned: it draws no numbers and has one result, which is tapped."""
    kind, leaves, operands = plan.kind, list(values), []
    if rows is not None:
        kind = kind.of_rows(rows)
    for position, name, derived in plan.mine:
        value = values[position]
        if derived:
            operand = operand_of(context, position, value)
        else:
            operand = Operand(position, value.detach(), name, value._version, id(value))
        leaves[position] = operand.value
        operands.append(operand)
    if kind.template.simple:
        result: Tensor = func(*leaves)
    else:
        args, kwargs = kind.template.call(leaves)
        result = func(*args, **kwargs)
    if not plan.wanted:
        return result
    saved = [values[k] for k in kind.data]
    if plan.additive:
        saved = [_stand_in(tensor) for tensor in saved]
        _forget_values(context, plan.operator, operands)
    use = Use(context.ref, kind, func, plan.leaves, operands, plan.place, plan.batches)
    if _is_any_autocast_enabled():
        use.autocast = current_autocast(operands[0].value.device)
    single = kind.single
    assert single is not None
    followed = tap_single(context, plan.operator, use, result, single.layouts[0], saved)
    return result if followed is None else followed


def _may_be_differentiated(
    operator: Operator, operands: list[Operand], leaves: list[Any], kind: Kind
) -> bool:
    """Whether a gradient by data may be taken in which the parameters appear."""
    if operator.additive or not any(operand.wanted for operand in operands):
        return False
    if forward_ad._current_level >= 0:  # its derivatives pass a node of ours as they are
        return False
    return any(leaves[k].requires_grad for k in kind.data)


def _settled(
    context: Context, operator: Operator, states: Any, result: Any
) -> tuple[Any, Tensor | None]:
    """States in which unowned rows are assigned to samples; and which of them were guessed."""
    shape = result.shape if isinstance(result, Tensor) else ()
    n, patterns = context.n or 0, context.patterns
    return assign_owners(states, n, patterns, shape, more_to_come=operator.inplace)


def _kind(
    operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], roles: Roles
) -> tuple[list[Any], Kind]:
    """A call's leaves, and what is common to calls like it."""
    leaves, template = taken_apart(args, kwargs)
    owned = {id(t) for t in roles.owned}
    layouts = {id(t): s for t, s in roles.coloured if s.__class__ is Layout}
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    data = [k for k in places if id(leaves[k]) not in owned]
    kind = Kind(
        operator.name, template, [k for k in places if id(leaves[k]) in owned], data,
        [layouts.get(id(leaves[k])) for k in data], operator.inplace,
    )  # fmt: skip
    return leaves, kind


def _stepwise(context: Context, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A recurrent operator by steps of our own; None where the native one must do."""
    if name in CELLS:
        return cell(context, name, args, kwargs)
    asked = request(name, args, kwargs)
    return None if asked is None else unroll(context, asked)


def _data_and_graph(
    context: Context, operator: Operator, leaves: list[Any], kind: Kind
) -> list[Tensor]:
    """What the gradient by data is computed from, with the graphs that lead to it."""
    data = [leaves[k].clone() if operator.inplace and k == 0 else leaves[k] for k in kind.data]
    return [*data, *(leaves[k] for k in kind.mine)] if context.options.native else data


def _kept_data(context: Context, operator: Operator, leaves: list[Any], kind: Kind) -> list[Tensor]:
    """What backward needs of the data: no values where no derivative reads them."""
    if operator.additive and operator.name not in context.options.rules:
        return [_stand_in(leaves[k]) for k in kind.data]
    if operator.inplace:
        return [leaves[k].detach().clone() if k == 0 else leaves[k] for k in kind.data]
    return [leaves[k] for k in kind.data]


def _forget_values(context: Context, operator: Operator, operands: list[Operand]) -> None:
    """What was computed from parameters, like the position of each token, where no one reads it."""
    if operator.additive and operator.name not in context.options.rules:
        for operand in operands:
            if operand.name is None:
                operand.value = _stand_in(operand.value)


def _stand_in(tensor: Tensor) -> Tensor:
    """The shape, dtype and device of data whose values no derivative needs."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    return tensor.detach().new_zeros(()).expand(tensor.shape)


def not_per_sample(operator: Operator, coloured: Coloured) -> Mixed | None:
    """Why a parameter cannot be used with these data: they do not belong to one sample each."""
    for tensor, state in coloured:
        if isinstance(state, Constant):
            continue
        if isinstance(state, Layout):
            if tensor.layout is not torch.strided:
                why, fix = "a parameter is used with samples in a sparse tensor", "to_dense() first"
                return Mixed(Reason(operator.name, why, (tuple(tensor.shape),), here(), fix))
            if state.coupled is None:
                continue
            return Mixed(state.coupled)
        if operator.routes and not tensor.is_floating_point() and not tensor.requires_grad:
            continue
        if isinstance(state, Mixed):
            return state
        why = "parameters are used with a sum over samples (a regulariser on parameters alone?)"
        fix = (
            "give the regulariser its own backward() after tape.set_grad(...); if it is none, "
            'record(..., unproven="loop")'
        )
        return Mixed(Reason(operator.name, why, (tuple(tensor.shape),), here(), fix))
    return None


def _write_back(context: Context, target: Tensor, value: Tensor) -> Tensor:
    """Give an in-place operator's target its new value and history."""
    state = context.look(value)
    place = target
    if isinstance(context.look(target), Derived) and target.grad_fn is not None:
        place = _cut_off(context, target)
    place.copy_(value)
    known = context.states.table.get(id(target))
    context.written.add(target, known, state)
    before = known.state if known is not None else None
    after = CONSTANT if state is None or isinstance(state, Derived) else state
    context.states.rewrite(target, after, changed=not same(before, after))
    return target


def _cut_off(context: Context, target: Tensor) -> Tensor:
    """Where to write: the old history leads to parameters and must not be followed again.

    A view has the history of its base, which is a layer's own memory, or refused from here on.
    """
    base = target._base
    if base is None:
        return target.detach_()
    if context.options.native or target.dtype != base.dtype or target.is_conj() or target.is_neg():
        return target
    return base.detach_().as_strided(target.shape, target.stride(), target.storage_offset())
