"""The autograd node that hands an operator's output gradient to its use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Tap(torch.autograd.Function):
    """Identity on the outputs of one operator; saves the operator's data arguments.

    Saving goes through ``save_for_backward``, so that activation checkpointing and saved-tensor
    hooks see it and an argument overwritten in place raises. The anchor gives the node a reason to
    exist where no data argument requires a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, use: Any, count: int, dirty: bool, *tensors: Tensor
    ) -> Any:
        """Pass ``tensors[count:]`` through; keep ``tensors[:count]``."""
        outs = tensors[count:]
        ctx.use, ctx.count = use, count
        ctx.save_for_backward(*tensors[:count])
        ctx.set_materialize_grads(False)
        if dirty:
            ctx.mark_dirty(*outs)
        else:
            outs = tuple(o.clone() for o in outs)
        return outs[0] if len(outs) == 1 else outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Hand the gradients to the use and pass them on."""
        if any(g is not None for g in grads):
            ctx.use.fire(ctx.saved_tensors, grads)
        return (None, None, None, None, *(None,) * ctx.count, *grads)
