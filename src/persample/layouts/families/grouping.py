"""Operators on groups of rows or elements: runs of rows, keys, counts."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import Mixing
from ..call import Call, Result, carry
from ..layout import Layout, explicit, ids_of
from ..operators import rule
from ..reshaping import colour_groups


@rule("segment_reduce", routes=True)
def segments(call: Call) -> Result:
    """Runs of rows, each of one sample."""
    x, axis = call.arg(0, "data"), call.kwargs.get("axis", 0)
    lengths, offsets = call.kwargs.get("lengths"), call.kwargs.get("offsets")
    given = lengths if lengths is not None else offsets
    layout = call.layout(x)
    if layout is None or axis or given is None or given.dim() != 1:
        raise Mixing("segments along other axes than the first")
    if 0 not in layout.axes:
        return layout
    if layout.axes != (0,):
        raise Mixing("segments of rows that hold several samples")
    counts = lengths if lengths is not None else given.diff()
    count = call.out.shape[0]
    segment = torch.arange(count, device=x.device).repeat_interleave(counts.to(x.device))
    rows = call.colours(x).flatten()[: segment.numel()]
    why = "a segment holds rows of several samples"
    colours = colour_groups(segment, rows, count, why=why)
    return explicit(colours.view(-1, *(1,) * (call.out.dim() - 1)), call.n)


@rule("unique unique_consecutive", routes=True)
def keys(call: Call) -> Result:
    """Which keys there are, how many, and each key's place among them depend on the whole batch."""
    raise Mixing(
        f"{call.name} looks at the whole batch",
        "to route rows by their keys: for key in keys.unique().tolist()",
    )


@rule("histc histogram searchsorted", routes=True)
def counting(call: Call) -> Result:
    """Rows of sorted sequences are searched on their own; counts over samples are mixed."""
    if call.name == "searchsorted":
        keys, values = call.arg(0, "sorted_sequence"), call.arg(1, "input")
        if isinstance(values, Tensor):
            core = {values.dim() - 1} if keys.dim() > 1 else set()
            return carry(call, [(keys, {keys.dim() - 1}), (values, core)], call.out, core)
    raise Mixing(f"{call.name} looks at the whole batch")


@rule("to_sparse coalesce")
def sparse(call: Call) -> Result:
    """The same elements; nothing is read off the shape of a sparse tensor without a look."""
    x = call.arg(0, "input", "self")
    layout = call.layout(x)
    if layout is None or layout.ids is not None:
        return layout
    return Layout(layout.axis, 1, ids_of(layout, x.shape, call.n, x.device))


@rule("to_dense")
def dense(call: Call) -> Result:
    """The same elements."""
    layout = call.layout(call.arg(0, "input", "self"))
    return layout if layout is None or layout.ids is None else explicit(layout.ids, call.n)
