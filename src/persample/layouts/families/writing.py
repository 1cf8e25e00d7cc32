"""Writing by index: rows keep their colours, and may not be written over another sample's."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import Mixing
from ..call import Call, Result, other_sizes
from ..layout import Layout, align, closed, explicit, ids_of, remap
from ..operators import rule
from ..reshaping import kept_axes, paint, squeeze_colours
from ..subscript import expand_index
from .shape import probe_layouts


def layout_after_write(before: Tensor, after: Tensor, n: int) -> Layout:
    """The target's layout from its colours before and after, where colours may not change."""
    if bool(((before >= 0) & (after != before)).any()):
        raise Mixing("rows of one sample are written over, or added to, rows of another")
    return explicit(squeeze_colours(after, n), n)


@rule("setitem index_put _index_put_impl", linear=True, routes=True)
def setitem(call: Call) -> Result:
    """``x[index] = value`` and ``index_put``."""
    x, index = call.arg(0, "input", "self"), call.arg(1, "indices")
    value = call.arg(2, "values")
    if call.name != "setitem":
        index = tuple(slice(None) if i is None else i for i in index)
    layout = call.layout(x)
    brought = call.layout(value) if isinstance(value, Tensor) else None
    if brought is None:
        return layout
    entries = expand_index(index, x.dim())
    region = x.detach()[tuple(entries)]
    while value.dim() > region.dim() and value.shape[0] == 1:  # torch drops leading ones
        value_axes = [None, *range(value.dim() - 1)]
        brought = remap(brought, value_axes, value.dim() - 1)
        value = value.squeeze(0)
    brought = align(brought, value.shape, region.shape, call.n)
    places: list[int | None] = [None] * x.dim()
    if not any(isinstance(e, (Tensor, bool)) for e in entries):
        places, _ = kept_axes(x.shape, lambda t: t[tuple(entries)])
    if brought.ids is None and brought.axis in places:
        whole = closed(places.index(brought.axis), brought.inner)
        if layout in (None, whole):
            return whole
    mine, colours = call.colours(x), ids_of(brought, region.shape, call.n, x.device)
    thin = [k is not None and mine.size(d) == colours.size(k) == 1 for d, k in enumerate(places)]
    before = mine.expand([1 if thin[d] else size for d, size in enumerate(x.shape)])
    order = torch.arange(before.numel(), device=x.device).view(before.shape)[tuple(entries)]
    after = paint(before, order, colours.expand(order.shape))
    return layout_after_write(before, after, call.n)


@rule("index_add index_copy", linear=True, routes=True)
def index_add(call: Call) -> Result:
    """Rows of the source go to the rows that the index names."""
    x, index, source = call.arg(0, "input"), call.arg(2, "index"), call.arg(3, "source", "tensor")
    axis = call.arg(1, "dim") % max(x.dim(), 1)
    return _scatter_layout(call, x, source, axis, index, along_axis=True)


@rule("scatter scatter_add", linear=True, routes=True)
def scatter(call: Call) -> Result:
    """Elements of the source go where the index names, along one axis."""
    x, index, source = call.arg(0, "input"), call.arg(2, "index"), call.arg(3, "src", "value")
    if x.dim() == 0:
        raise Mixing("scatter into a scalar")
    axis = call.arg(1, "dim") % x.dim()
    if call.layout(source) is None:
        if call.layout(x) is not None or call.layout(index) is None:
            return call.layout(x)
        source = index
    return _scatter_layout(call, x, source, axis, index, along_axis=False)


# products and extremes: a sum over samples does not stay one
rule("index_reduce", routes=True)(index_add)
rule("scatter_reduce", routes=True)(scatter)


def _scatter_layout(
    call: Call, x: Tensor, source: Tensor, axis: int, index: Tensor, *, along_axis: bool
) -> Result:
    layout, brought = call.layout(x), call.layout(source)
    if brought is None:
        return layout
    placed = bool(brought.axes) and axis not in brought.axes
    if placed and (layout is None or axis not in layout.axes):
        same = other_sizes(x, axis) == other_sizes(source, axis)
        if same and (along_axis or index.shape == source.shape):
            return call.merge(layout, brought, out=x)
    mine = call.colours(x)
    colours = ids_of(brought, source.shape, call.n, x.device)
    if along_axis:
        sizes = [
            x.shape[d] if d == axis else max(mine.size(d), colours.size(d)) for d in range(x.dim())
        ]
        rows = [index.numel() if d == axis else s for d, s in enumerate(sizes)]
        before, colours = mine.expand(sizes), colours.expand(rows)
        places = torch.arange(before.numel(), device=x.device).view(sizes).index_select(axis, index)
    else:
        before = mine.expand(x.shape)
        part = tuple(slice(0, s) for s in index.shape)
        colours = colours.expand(source.shape)[part]
        places = torch.arange(before.numel(), device=x.device).view(x.shape).gather(axis, index)
    after = paint(before, places, colours)
    return layout_after_write(before, after, call.n)


@rule("put", routes=True)
def put(call: Call) -> Result:
    """Elements of the source go to places of the flattened target."""
    x, index, source = call.arg(0, "input", "self"), call.arg(1, "index"), call.arg(2, "source")
    layout, brought = call.layout(x), call.layout(source)
    if brought is None:
        return layout
    before = call.colours(x).expand(x.shape)
    colours = ids_of(brought, source.shape, call.n, x.device).expand(source.shape)
    after = paint(before, index % max(x.numel(), 1), colours)
    return layout_after_write(before, after, call.n)


@rule("index_fill as_strided_scatter", routes=True)
def overwrite(call: Call) -> Result:
    """Rarely used writes: followed only if nothing coloured is written."""
    x = call.arg(0, "input", "self")
    layout = call.layout(x)
    fills = call.name == "index_fill" and layout is not None
    read = {id(x), id(call.arg(2, "index"))} if fills else {id(x)}
    if not read.issuperset(call.layouts):
        raise Mixing(f"{call.name} writes rows that hold samples")
    return layout


@rule("masked_scatter", routes=True)
def masked_scatter(call: Call) -> Result:
    """The source's elements, in order, go where the mask holds."""
    x, mask, source = call.arg(0, "input", "self"), call.arg(1, "mask"), call.arg(2, "source")
    layout, brought = call.layout(x), call.layout(source)
    if layout is not None:
        layout = align(layout, x.shape, call.out.shape, call.n)
    if brought is None:
        return layout
    if x.shape != call.out.shape:
        raise Mixing("masked_scatter of a tensor that is broadcast")
    width = x.shape[-1] if x.dim() else 1
    thin = (
        x.dim() > 1
        and mask.shape == x.shape
        and mask.stride(-1) == 0
        and width > 0
        and source.dim() > 0
        and source.shape[-1] == width
    )  # whole rows: one element of each will do
    shape = (*x.shape[:-1], 1) if thin else tuple(x.shape)
    mine, colours = call.colours(x), ids_of(brought, source.shape, call.n, x.device)
    if thin and (mine.shape[-1] != 1 or colours.shape[-1] != 1):
        raise Mixing("rows hold several samples")
    before = mine.expand(shape)
    rows = (*source.shape[:-1], 1) if thin else tuple(source.shape)
    holds = mask[..., :1] if thin else mask.expand(x.shape)
    after = before.clone().masked_scatter_(holds, colours.expand(rows).contiguous())
    return layout_after_write(before, after, call.n)


@rule("select_scatter slice_scatter diagonal_scatter", routes=True)
def replace_part(call: Call) -> Result:
    """Colours by running the write on colours; a place may keep its colour or take one."""
    x, outside = call.arg(0, "input", "self"), probe_layouts(call)
    return call.merge(call.layout(x), outside, out=x)  # type: ignore[arg-type]
