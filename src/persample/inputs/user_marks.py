"""What the user says of tensors: where their samples are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UsageError, describe, here
from ..layouts import Constant, Layout, closed, explicit, squeeze_colours
from ..uses import Context
from ..validation import expect_ids, shown, whole


def mark(context: Context, tensor: Tensor, *, dim: int = 0, ids: Tensor | None = None) -> None:
    """The user says where the samples are."""
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        raise UsageError(
            f"mark takes a tensor with at least one axis, got {shown(tensor)}",
            fix="tape.mark(x, dim=0) for data whose axis 0 holds the samples",
        )
    dim = whole(dim, "dim")
    if not -tensor.dim() <= dim < tensor.dim():
        raise UsageError(
            f"no axis {dim} in a tensor of shape {tuple(tensor.shape)}",
            fix="dim is the axis that holds the samples",
        )
    axis = dim % tensor.dim()
    with torch._C.DisableTorchFunction():
        _expect_unknown(context, tensor)
        context.user_code.expose(tensor)
        by_ids = None if ids is None else _layout_of_ids(context, tensor, axis, ids)
        _put(context, tensor, by_ids or _layout_of_axis(context, tensor, axis))
        context.caller.add(tensor)


def _layout_of_axis(context: Context, tensor: Tensor, axis: int) -> Layout:
    """One index for each sample; the first tensor says how many there are."""
    if context.n is None:
        context.n = tensor.shape[axis]
    if tensor.shape[axis] != context.n:
        raise UsageError(
            f"axis {axis} of a tensor {tuple(tensor.shape)} does not hold {context.n} samples",
            fix="one record block for each batch; give ids= for rows that are not one per sample",
        )
    return closed(axis)


def _put(context: Context, tensor: Tensor, layout: Layout) -> None:
    """Mark a tensor; one that was not known to hold samples opens a batch of its own."""
    marks = context.states
    known = marks.table.get(id(tensor))
    _expect_same_ids(None if known is None else known.state, layout, tensor)
    fresh = known is None or not isinstance(known.state, Layout)
    batches = context.batches.enter(()) if known is None or fresh else known.batches
    marks.put(tensor, layout)
    marks.table[id(tensor)].batches = batches


def _expect_same_ids(known: object, layout: Layout, tensor: Tensor) -> None:
    """A tensor that is one sample's cannot be another's later in the same recording."""
    if not isinstance(known, Layout) or known.ids is None or layout.ids is None:
        return
    shapes = known.ids.expand(tensor.shape), layout.ids.expand(tensor.shape)
    if not torch.equal(*shapes):
        raise UsageError(
            f"a tensor {tuple(tensor.shape)} was marked with other ids before",
            where=describe(here()),
            why="tensors are told apart by identity: all of its uses would count for the last ids",
            fix="mark and use a copy: x = tape.mark(x.clone(), ids=...)",
        )


def _expect_unknown(context: Context, tensor: Tensor) -> None:
    """What was computed from parameters holds its samples where the recorder saw them go."""
    known = context.look(tensor) if tensor.requires_grad else None
    if known is not None and not isinstance(known, Constant):
        raise UsageError(
            f"a tensor {tuple(tensor.shape)} that depends on parameters cannot be marked",
            where=describe(here()),
            why="its gradients have been followed already, and a mark would not move them",
            fix="mark the data that the model is called with",
        )


def _layout_of_ids(context: Context, tensor: Tensor, axis: int, ids: Tensor) -> Layout:
    size = tensor.shape[axis]
    if context.n is None:
        raise UsageError("ids need the number of samples", fix="record(model, n=...)")
    expect_ids(ids, "ids")
    if ids.shape != (size,):
        raise UsageError(
            f"ids must have shape ({size},), got {tuple(ids.shape)}",
            fix="one number for every index of the axis dim",
        )
    if size and not (int(ids.min()) >= -1 and int(ids.max()) < context.n):
        raise UsageError(
            f"ids must lie between -1 and {context.n - 1}", fix="-1 is a row of no sample"
        )
    view = [1] * tensor.dim()
    view[axis] = size
    colours = ids.to(tensor.device, torch.long, copy=True).view(view)
    context.patterns.append(colours.flatten())
    return explicit(squeeze_colours(colours, context.n), context.n)
