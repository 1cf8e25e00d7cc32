"""The results of a use are tapped, so that backward brings their gradients, and marked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import Reason, here
from ..layouts import CONSTANT, Additive, Layout, Mixed, Operator, State, closed, collect
from ..run_state import fingerprint
from ..uses import ANCHOR, Context, Tap, Use, hook, tapped


def tap(
    context: Context, operator: Operator, use: Use, result: Any, states: Any, saved: list[Tensor]
) -> Any:
    """Put one node behind the results that have a layout, and mark all of them."""
    if states.__class__ is Layout and isinstance(result, Tensor):
        followed: Tensor | None = result
        if use.wanted:
            followed = tap_single(context, operator, use, result, states, saved)
        if followed is not None:
            context.states.put(followed, states)
            return followed
    outs = collect(result)
    each = list(states) if isinstance(states, list) else [states] * len(outs)
    each = [_checked(operator, out, state) for out, state in zip(outs, each, strict=True)]
    # a result that is not followed is tapped too: a gradient that reaches it is refused
    use.tapped = tapped(
        [
            (
                k,
                state if isinstance(state, Layout) else closed(0),
                state.reason if isinstance(state, Mixed) else None,
                out,
            )
            for k, (out, state) in enumerate(zip(outs, each, strict=True))
            if state is not None and (out.is_floating_point() or out.is_complex())
        ]
    )
    if use.tapped.results and use.wanted:
        if context.expects:
            context.receiver.expect(use)
        _through_node(context, operator, use, outs, saved)
    for tensor, state in zip(outs, each, strict=True):
        if state is not None:
            context.states.put(tensor, state)
        elif tensor.requires_grad:
            context.states.put(tensor, CONSTANT)
    return _rebuild(result, iter(outs))


def tap_single(
    context: Context, operator: Operator, use: Use, result: Tensor, layout: Layout,
    saved: list[Tensor],
) -> Tensor | None:  # fmt: skip
    """Tap the only result: at its own node, or at one of ours. None if it has no gradient."""
    single = use.kind.single
    if single is None or single.dtypes[0] is not result.dtype:
        if not (result.is_floating_point() or result.is_complex()):
            return None
        single = use.kind.single = tapped([(0, layout, None, result)])
    use.tapped = single
    if context.expects:
        context.receiver.expect(use)
    if not context.options.native and operator.fresh and not operator.inplace:
        if hook(use, result, saved):
            return result
    return _through_node(context, operator, use, [result], saved)[0]


def _through_node(
    context: Context, operator: Operator, use: Use, outs: list[Tensor], saved: list[Tensor]
) -> list[Tensor]:
    """The results, those that are tapped replaced by those of a node of our own."""
    dirty = operator.fresh and len(outs) == 1
    if dirty and outs[0]._base is not None:  # a view of a result that no one else sees
        dirty = not outs[0].requires_grad
        outs[0] = outs[0].detach() if dirty else outs[0]
    if torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        dirty = False  # selective checkpointing keeps what it saw, forward mode a derivative
    picked = [outs[k].detach() if use.closed else outs[k] for k in use.tapped.results]
    use.fingerprint = fingerprint(saved, again=context.backward.receiving)
    new = Tap.apply(ANCHOR, use, len(saved), dirty, *saved, *picked)
    for k, tensor in zip(use.tapped.results, (new,) if len(picked) == 1 else new, strict=True):
        outs[k] = tensor
    return outs


def _checked(operator: Operator, out: Tensor, state: State | None) -> State | None:
    """Refuse results that depend on the parameter and are not one sample's each."""
    if operator.constant or not (out.is_floating_point() or out.is_complex()):
        return state
    why, fix = "", ""
    if state is None:
        why = "one of the results depends on the parameter but on no sample"
    elif isinstance(state, Additive):
        why = "a parameter is used with data in an operator that sums over samples at once"
        fix = 'keep the samples separate first (reduction="none", or multiply and then sum)'
    else:
        return state
    return Mixed(Reason(operator.name, why, (tuple(out.shape),), here(), fix))


def _rebuild(template: Any, items: Iterator[Tensor]) -> Any:
    if isinstance(template, Tensor):
        return next(items)
    if isinstance(template, (list, tuple)):
        made = [_rebuild(v, items) for v in template]
        return type(template)(*made) if hasattr(template, "_fields") else type(template)(made)
    return template
