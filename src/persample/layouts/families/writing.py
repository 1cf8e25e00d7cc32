"""Writing by index: rows keep their colours, and may not be written over another sample's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...errors import Mixing
from ..call import Call, Result, other_sizes
from ..layout import align, closed, disagree, explicit, ids_of, place
from ..operators import rule
from ..reshaping import kept_axes, paint, squeeze_colours
from .indexing import entries_of
from .shape import probe_layouts


def _write(
    call: Call, x: Tensor, colours: Tensor, read: Callable[[Tensor], Tensor],
    kept: Sequence[int | None] | None = None,
) -> Result:  # fmt: skip
    """Colours after a write to the places that ``read`` reads; no sample's may change.

    ``kept``: where each axis of the target is in what is read, None unless as a whole. One element
    will do along those without colours.
    """
    mine, kept = call.colours(x), kept or [None] * x.dim()
    thin = [k is not None and mine.size(d) == colours.size(k) == 1 for d, k in enumerate(kept)]
    before = mine.expand([1 if thin[d] else size for d, size in enumerate(x.shape)])
    places = read(torch.arange(before.numel(), device=x.device).view(before.shape))
    written = colours[tuple(slice(size) for size in places.shape)].expand(places.shape)
    after = paint(before, places, written)
    if call.layout(x) is not None and disagree(before, after):
        raise Mixing("rows of one sample are written over, or added to, rows of another")
    return explicit(squeeze_colours(after, call.n), call.n)


@rule("setitem index_put _index_put_impl", linear=True, routes=True)
def setitem(call: Call) -> Result:
    """``x[index] = value`` and ``index_put``; torch drops leading axes of one of the value."""
    x, value = call.arg(0, "input", "self"), call.arg(2, "values")
    layout, brought = call.layout(x), call.layout(value)
    if brought is None:
        return layout
    entries = tuple(entries_of(call, x))
    region, kept = x.detach()[entries], None
    more = value.dim() - region.dim()
    axes = [d - more if d >= more else None for d in range(value.dim())]
    brought = place(brought, value.shape, axes, region.shape, call.n)
    if not any(isinstance(e, (Tensor, bool)) for e in entries):
        kept, _ = kept_axes(x.shape, lambda t: t[entries])
        if brought.ids is None and brought.axis in kept:
            whole = closed(kept.index(brought.axis), brought.inner)
            if layout in (None, whole):
                return whole
    colours = ids_of(brought, region.shape, call.n, x.device)
    return _write(call, x, colours, lambda t: t[entries], kept)


@rule("index_add index_copy", linear=True, routes=True)
def index_add(call: Call) -> Result:
    """Rows of the source go to the rows that the index names."""
    x, index, source = call.arg(0, "input"), call.arg(2, "index"), call.arg(3, "source", "tensor")
    axis = call.arg(1, "dim") % max(x.dim(), 1)
    kept = [None if d == axis else d for d in range(x.dim())]
    return _write_along(call, axis, source, source, lambda t: t.index_select(axis, index), kept)


def _is_repeated(index: Tensor, axis: int) -> bool:
    """Whether all rows along an axis are the same ones."""
    return index.shape[axis] > 1 and index.stride(axis) == 0


@rule("scatter scatter_add", linear=True, routes=True)
def scatter(call: Call) -> Result:
    """Elements of the source go where the index names, along one axis."""
    x, index, source = call.arg(0, "input"), call.arg(2, "index"), call.arg(3, "src", "value")
    axis = call.arg(1, "dim") % max(x.dim(), 1)
    if call.layout(source) is None and call.layout(x) is None:
        source = index  # a number for the places that each sample names
    whole = [_is_repeated(index, d) and x.shape[d] == index.shape[d] for d in range(x.dim())]
    kept = [d if same and d != axis else None for d, same in enumerate(whole)]

    def read(t: Tensor) -> Tensor:
        some = index
        for d in kept:
            if d is not None and t.shape[d] == 1:
                some = some.narrow(d, 0, 1)
        return t.gather(axis, some)

    return _write_along(call, axis, source, index, read, kept)


# products and extremes: a sum over samples does not stay one
rule("index_reduce", routes=True)(index_add)
rule("scatter_reduce", routes=True)(scatter)


def _write_along(
    call: Call, axis: int, source: Tensor, region: Tensor, read: Callable[[Tensor], Tensor],
    kept: Sequence[int | None] | None = None,
) -> Result:  # fmt: skip
    """The same along one axis, with a source at least as large as the region that is written."""
    x = call.arg(0, "input")
    layout, brought = call.layout(x), call.layout(source)
    if brought is None:
        return layout
    if brought.axes and axis not in brought.axes and (layout is None or axis not in layout.axes):
        if other_sizes(x, axis) == other_sizes(source, axis) == other_sizes(region, axis):
            return call.merge(layout, brought, out=x)
    return _write(call, x, call.colours(source), read, kept)


@rule("put", routes=True)
def put(call: Call) -> Result:
    """Elements of the source go to places of the flattened target."""
    x, index, source = call.arg(0, "input", "self"), call.arg(1, "index"), call.arg(2, "source")
    if call.layout(source) is None:
        return call.layout(x)
    colours = call.colours(source).expand(source.shape).reshape(index.shape)
    return _write(call, x, colours, lambda t: t.take(index))


@rule("index_fill as_strided_scatter", routes=True)
def overwrite(call: Call) -> Result:
    """Rarely used writes: followed only if nothing coloured is written."""
    x = call.arg(0, "input", "self")
    if set(call.layouts) != {id(x)}:
        raise Mixing(f"{call.name} writes rows that hold samples")
    return call.layout(x)


@rule("masked_scatter", routes=True)
def masked_scatter(call: Call) -> Result:
    """The source's elements, in order, go where the mask holds."""
    x, mask, source = call.arg(0, "input", "self"), call.arg(1, "mask"), call.arg(2, "source")
    layout = call.layout(x)
    if call.layout(source) is None:
        return None if layout is None else align(layout, x.shape, call.out.shape, call.n)
    if x.shape != call.out.shape:
        raise Mixing("masked_scatter of a tensor that is broadcast")
    mask, ids, kept = mask.expand(x.shape), call.colours(source), None
    if x.dim() > 1 and mask.stride(-1) == 0 and source.shape[-1:] == x.shape[-1:]:  # whole rows
        mask, kept = mask[..., 0], [*[None] * (x.dim() - 1), 1]
        colours = ids.expand(*source.shape[:-1], -1).reshape(-1, ids.shape[-1])
    else:
        colours = ids.expand(source.shape).flatten()
    return _write(call, x, colours, lambda t: t[mask], kept)


@rule("select_scatter slice_scatter diagonal_scatter", routes=True)
def replace_part(call: Call) -> Result:
    """Colours by running the write on colours; a place may keep its colour or take one."""
    x, outside = call.arg(0, "input", "self"), probe_layouts(call)
    return call.merge(call.layout(x), outside, out=x)  # type: ignore[arg-type]
