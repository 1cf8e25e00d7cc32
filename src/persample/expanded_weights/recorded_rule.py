"""What every rule of ours does: forward records the call, backward queries the recording.

The mathematics is that of the recorder's rules and forms, as for a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch_checks import expect_axes, expect_batch, mixture
from .expanded_weights_impl import ExpandedWeight
from .expanded_weights_utils import is_batch_first, standard_kwargs
from .recorded_call import Call, record_call
from .recorded_graph import expect_first_order


def recorded_forward(
    ctx: Any, kwarg_names: Sequence[str], function: Callable[..., Any], *values: Any
) -> Tensor:
    """The function's result for all samples; the recording is kept in ``ctx``."""
    args, kwargs = standard_kwargs(kwarg_names, values)
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    expect_batch(function, args, kwargs)
    data = args[0]
    expect_axes(function, data, args, kwargs)
    call = Call(function, args, kwargs)
    for tensor in call.data()[1:]:
        if tensor.requires_grad:
            raise mixture(tensor)
    axis = 0 if is_batch_first(values) else 1
    with torch.enable_grad():
        out: Tensor = record_call(call, values, data, data.shape[axis], axis)
    ctx.recorded = getattr(out.grad_fn, "recorded", None)  # this rule's node takes its place
    ctx.count, ctx.place = len(values), next(k for k, v in enumerate(values) if v is data)
    tensors = [v for v in values if isinstance(v, Tensor)]
    ctx.weights = [k for k, v in enumerate(tensors) if isinstance(v, ExpandedWeight)]
    return out.detach()


def recorded_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """Set ``grad_sample`` of the expanded weights; the gradients that autograd expects."""
    expect_first_order()
    nodes = [ctx.next_functions[k][0] for k in ctx.weights]
    wanted = any(torch._C._will_engine_execute_node(node) for node in nodes)
    found: list[Tensor | None] = [None] * (2 + ctx.count)
    grads = ctx.recorded.backward((grad_output,), wanted=wanted)
    if grads:
        found[2 + ctx.place] = grads[0]
    return tuple(found)


class RecordedRule(torch.autograd.Function):
    """A rule for one function: rows for its weights, the gradient of its input."""

    forward = staticmethod(recorded_forward)
    backward = staticmethod(recorded_backward)
