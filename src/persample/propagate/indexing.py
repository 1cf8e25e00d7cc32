"""Reading and writing by index: colours move with the rows, whatever the indices say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import Mixing
from ..layout import Layout, align, explicit, ids_of, merge, remap, squeeze_colours
from .call import Call, Result, axes, carry
from .movement import probed
from .table import rule

Index = tuple[Any, ...]


def _spread(index: Any, rank: int) -> list[Any]:
    """The index as one entry per consumed axis (None entries add axes), Ellipsis filled in."""
    entries = list(index) if isinstance(index, tuple) else [index]
    entries = [torch.as_tensor(e) if isinstance(e, list) else e for e in entries]
    used = 0
    for entry in entries:
        if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
            used += entry.dim()
        elif entry is not None and entry is not Ellipsis and not isinstance(entry, bool):
            used += 1
    fill = [slice(None)] * (rank - used)
    for at, entry in enumerate(entries):
        if entry is Ellipsis:
            return entries[:at] + fill + entries[at + 1 :]
    return entries + fill


def _full(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == slice(None)


def _axis_steps(entries: list[Any]) -> list[tuple[Any, int, int]]:
    """(entry, first axis it consumes, how many axes it consumes)."""
    steps, axis = [], 0
    for entry in entries:
        if entry is None or isinstance(entry, bool):
            count = 0
        elif isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
            count = entry.dim()
        else:
            count = 1
        steps.append((entry, axis, count))
        axis += count
    return steps


def shrunk(ids: Tensor, shape: torch.Size, entries: list[Any]) -> Tensor:
    """Colours with axes of one wherever the index takes all of a colourless axis."""
    sizes = list(shape)
    for entry, axis, count in _axis_steps(entries):
        if count == 1 and _full(entry) and ids.size(axis) == 1:
            sizes[axis] = 1
    return ids.expand(sizes)


@rule("getitem index", linear=True, routes=True)
def getitem(call: Call) -> Result:
    """``x[index]``."""
    x, index = call.args[0], call.args[1]
    if call.name == "index" and isinstance(index, list):
        index = tuple(slice(None) if i is None else i for i in index)
    entries = _spread(index, x.dim())
    layout = call.layout(x)
    result: Layout | None = None
    if layout is not None:
        result = _read(layout, x, entries, call)
    chosen = _index_colours(call, entries)
    if chosen is None or chosen.coupled:
        return result
    if result is None:
        return chosen
    return merge(result, chosen, call.out.shape, call.n)


def _read(layout: Layout, x: Tensor, entries: list[Any], call: Call) -> Layout:
    if not any(isinstance(e, Tensor) for e in entries):
        places: list[int | None] = []
        axis, new, touched = 0, 0, set()
        for entry in entries:
            if entry is None:
                new += 1
                continue
            if not _full(entry):
                touched.add(axis)
            if isinstance(entry, slice):
                places.append(new)
                new += 1
            else:
                places.append(None)
            axis += 1
        if not any(d in touched for d in layout.axes) and new == call.out.dim():
            return remap(layout, places, new)
    ids = shrunk(ids_of(layout, x.shape, call.n, x.device), x.shape, entries)
    return explicit(squeeze_colours(ids[tuple(entries)], call.n), call.n)


def _index_colours(call: Call, entries: list[Any]) -> Layout | None:
    """The colours that integer indices bring along: a row looked up for sample i is of i."""
    tensors = [(k, e) for k, e in enumerate(entries) if isinstance(e, Tensor)]
    coloured = [e for _, e in tensors if call.layout(e) is not None]
    if not coloured or any(e.dtype in (torch.bool, torch.uint8) for e in coloured):
        return None
    advanced = [k for k, e in enumerate(entries) if isinstance(e, (Tensor, int)) and e is not True]
    adjacent = advanced == list(range(advanced[0], advanced[-1] + 1))
    width = max((e.dim() for _, e in tensors), default=0)
    if any(e.dtype in (torch.bool, torch.uint8) for _, e in tensors):
        return None
    before = sum(1 for e in entries[: advanced[0]] if e is None or isinstance(e, slice))
    start = before if adjacent else 0
    result: Layout | None = None
    for entry in coloured:
        layout = call.layout(entry)
        assert layout is not None
        shift = start + width - entry.dim()
        moved = remap(layout, [d + shift for d in range(entry.dim())], call.out.dim())
        if moved.ids is None and call.out.shape[moved.axis] != entry.shape[layout.axis]:
            raise Mixing("the index that holds the samples is broadcast")
        result = moved if result is None else merge(result, moved, call.out.shape, call.n)
    return result


@rule("index_select embedding_select", linear=True, routes=True)
def index_select(call: Call) -> Result:
    """Rows along one axis; the index's own colours count where the source has none."""
    x, index = call.arg(0, "input", "self"), call.arg(2, "index")
    axis = call.arg(1, "dim") % max(x.dim(), 1)
    layout, chosen = call.layout(x), call.layout(index)
    result: Layout | None = None
    if layout is not None:
        if axis not in layout.axes:
            result = layout
        else:
            ids = ids_of(layout, x.shape, call.n, x.device)
            result = explicit(squeeze_colours(ids.index_select(axis, index), call.n), call.n)
    if chosen is not None and index.dim() == 1:
        brought = remap(chosen, [axis], call.out.dim())
        result = brought if result is None else merge(result, brought, call.out.shape, call.n)
    return result


@rule("gather take_along_dim", linear=True, routes=True)
def gather(call: Call) -> Result:
    """Off the gathered axis, rows keep their position."""
    x = call.arg(0, "input", "self")
    if call.name == "gather":
        dim, index = call.arg(1, "dim"), call.arg(2, "index")
    else:
        index, dim = call.arg(1, "indices"), call.arg(2, "dim")
        if dim is None:
            return probed(call)  # type: ignore[return-value]
    if x.dim() == 0:
        return None
    axis = dim % x.dim()
    layout, chosen = call.layout(x), call.layout(index)
    result: Layout | None = None
    if layout is not None:
        ids = ids_of(layout, x.shape, call.n, x.device)
        if axis in layout.axes:
            full = ids.expand(x.shape)
            op = torch.gather if call.name == "gather" else torch.take_along_dim
            picked = (
                op(full, dim=axis, index=index) if op is torch.gather else op(full, index, axis)
            )
            result = explicit(squeeze_colours(picked, call.n), call.n)
        elif (
            call.out.shape[:axis] == x.shape[:axis]
            and call.out.shape[axis + 1 :] == x.shape[axis + 1 :]
        ):
            result = layout
        else:
            for d in range(x.dim()):
                if d != axis and ids.size(d) != 1:
                    ids = ids.narrow(d, 0, call.out.shape[d])
            result = explicit(ids, call.n)
    if chosen is not None:
        brought = align(chosen, index.shape, call.out.shape, call.n)
        result = brought if result is None else merge(result, brought, call.out.shape, call.n)
    return result


@rule("take", linear=True, routes=True)
def take(call: Call) -> Result:
    """Indices into the flattened tensor."""
    x, index = call.arg(0, "input", "self"), call.arg(1, "index")
    layout, chosen = call.layout(x), call.layout(index)
    result: Layout | None = None
    if layout is not None:
        ids = ids_of(layout, x.shape, call.n, x.device).expand(x.shape)
        result = explicit(squeeze_colours(ids.take(index), call.n), call.n)
    if chosen is not None:
        result = chosen if result is None else merge(result, chosen, call.out.shape, call.n)
    return result


@rule("masked_select", linear=True, routes=True)
def masked_select(call: Call) -> Result:
    """Rows where the mask holds."""
    x, mask = call.arg(0, "input", "self"), call.arg(1, "mask")
    layout = call.layout(x)
    if layout is None:
        return None
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    ids = ids_of(align(layout, x.shape, shape, call.n), shape, call.n, x.device).expand(shape)
    return explicit(squeeze_colours(ids.masked_select(mask), call.n), call.n)


@rule("embedding", routes=True)
def embedding(call: Call) -> Result:
    """A row of the table for every index."""
    index = call.arg(1, "indices", "input")
    return carry(call, [(index, ())], call.out, {call.out.dim() - 1})


@rule("embedding_bag _embedding_bag _embedding_bag_forward_only", routes=True)
def embedding_bag(call: Call) -> Result | list[Result]:
    """A bag belongs to the sample of its rows, or of its offset."""
    index, offsets = call.arg(1, "indices"), call.arg(2, "offsets")
    weights = call.arg(6, "per_sample_weights")
    bags = call.out[0].shape[0]
    rows = _common_rows(call, [index, weights])
    marks = call.layout(offsets)
    result: Layout | None = None
    if rows is not None:
        last = index.shape[0]
        starts = offsets[:bags].to(torch.long)
        bag = torch.searchsorted(starts, torch.arange(last, device=index.device), right=True) - 1
        colours = torch.full((bags,), -1, device=index.device)
        colours[bag] = rows
        if bool((colours[bag] != rows).any()):
            raise Mixing("a bag holds rows of several samples")
        result = explicit(colours.view(-1, 1), call.n)
    if marks is not None:
        brought = remap(marks, [0], 2)
        result = brought if result is None else merge(result, brought, call.out[0].shape, call.n)
    return [result, *[None] * (len(call.out) - 1)]


def _common_rows(call: Call, tensors: list[Any]) -> Tensor | None:
    """One colour per row of 1-D tensors that run in parallel."""
    result: Layout | None = None
    for tensor in tensors:
        layout = call.layout(tensor)
        if layout is not None:
            result = layout if result is None else merge(result, layout, tensor.shape, call.n)
    if result is None:
        return None
    shape, device = tensors[0].shape, tensors[0].device
    return ids_of(result, shape, call.n, device).expand(shape)


def written(target: Tensor, before: Tensor, after: Tensor, n: int) -> Layout:
    """The target's layout from its colours before and after, where colours may not change."""
    if bool(((before >= 0) & (after != before)).any()):
        raise Mixing("rows of one sample are written over, or added to, rows of another")
    return explicit(squeeze_colours(after, n), n)


@rule("setitem index_put _index_put_impl", linear=True, routes=True)
def setitem(call: Call) -> Result:
    """``x[index] = value`` and ``index_put``."""
    x, index, value = call.args[0], call.args[1], call.arg(2, "values")
    if call.name != "setitem":
        index = tuple(slice(None) if i is None else i for i in index)
    layout = call.layout(x)
    brought = call.layout(value) if isinstance(value, Tensor) else None
    if brought is None:
        return layout
    entries = _spread(index, x.dim())
    mine = (
        torch.full((1,) * x.dim(), -1, device=x.device)
        if layout is None
        else ids_of(layout, x.shape, call.n, x.device)
    )
    region = x.detach()[tuple(entries)]
    while value.dim() > region.dim() and value.shape[0] == 1:  # torch drops leading ones
        value_axes = [None, *range(value.dim() - 1)]
        brought = remap(brought, value_axes, value.dim() - 1)
        value = value.squeeze(0)
    brought = align(brought, value.shape, region.shape, call.n)
    colours = ids_of(brought, region.shape, call.n, x.device)
    before = mine.expand(x.shape)
    if not any(isinstance(e, Tensor) for e in entries):
        before = _only_needed(mine, colours, x.shape, entries)
    after = before.clone()
    if isinstance(after[tuple(entries)], Tensor):
        target = after[tuple(entries)]
        after[tuple(entries)] = colours.expand(_fit(colours, target))
    kept = after[tuple(entries)]
    if bool((kept != colours.expand(_fit(colours, kept))).any()):
        raise Mixing("rows of several samples are written to one place")
    return written(x, before, after, call.n)


def _fit(colours: Tensor, target: Tensor) -> list[int]:
    return list(target.shape)


def _only_needed(mine: Tensor, colours: Tensor, shape: torch.Size, entries: list[Any]) -> Tensor:
    """Target colours with axes of one where neither side changes colour and all is written."""
    sizes, new = list(shape), 0
    for entry, axis, count in _axis_steps(entries):
        if entry is None:
            new += 1
        elif isinstance(entry, slice):
            if count and _full(entry) and mine.size(axis) == 1 and colours.size(new) == 1:
                sizes[axis] = 1
            new += 1
    return mine.expand(sizes)


@rule("index_add index_copy index_reduce", linear=True, routes=True)
def index_add(call: Call) -> Result:
    """Rows of the source go to the rows that the index names."""
    x, index, source = call.arg(0, "input"), call.arg(2, "index"), call.arg(3, "source", "tensor")
    axis = call.arg(1, "dim") % max(x.dim(), 1)
    return _scattered(call, x, source, axis, index, along_axis=True)


@rule("scatter scatter_add scatter_reduce", linear=True, routes=True)
def scatter(call: Call) -> Result:
    """Elements of the source go where the index names, along one axis."""
    x, index, source = call.arg(0, "input"), call.arg(2, "index"), call.arg(3, "src", "value")
    if x.dim() == 0:
        raise Mixing("scatter into a scalar")
    axis = call.arg(1, "dim") % x.dim()
    if not isinstance(source, Tensor) or call.layout(source) is None:
        layout, chosen = call.layout(x), call.layout(index)
        if chosen is not None and layout is None:
            return _scattered(call, x, index, axis, index, along_axis=False)
        return layout
    return _scattered(call, x, source, axis, index, along_axis=False)


def _scattered(
    call: Call, x: Tensor, source: Tensor, axis: int, index: Tensor, *, along_axis: bool
) -> Result:
    layout, brought = call.layout(x), call.layout(source)
    if brought is None:
        return layout
    placed = brought.ids is None and axis not in brought.axes
    if placed and (layout is None or axis not in layout.axes):
        same = (
            x.shape[:axis] == source.shape[:axis]
            and x.shape[axis + 1 :] == source.shape[axis + 1 :]
        )
        if same and (along_axis or index.shape == source.shape):
            return brought if layout is None else merge(layout, brought, x.shape, call.n)
    mine = torch.full((1,) * x.dim(), -1, device=x.device)
    if layout is not None:
        mine = ids_of(layout, x.shape, call.n, x.device)
    colours = ids_of(brought, source.shape, call.n, x.device)
    if along_axis:
        sizes = [
            x.shape[d] if d == axis else max(mine.size(d), colours.size(d)) for d in range(x.dim())
        ]
        rows = [index.numel() if d == axis else s for d, s in enumerate(sizes)]
        before = mine.expand(sizes)
        colours = colours.expand(rows)
        after = before.clone().index_copy_(axis, index, colours)
        kept = after.index_select(axis, index)
    else:
        before = mine.expand(x.shape)
        part = tuple(slice(0, s) for s in index.shape)
        colours = colours.expand(source.shape)[part]
        after = before.clone().scatter_(axis, index, colours)
        kept = after.gather(axis, index)
    if bool((kept != colours).any()):
        raise Mixing("rows of several samples are written to one place")
    return written(x, before, after, call.n)


@rule(
    "index_fill masked_scatter put select_scatter slice_scatter diagonal_scatter "
    "as_strided_scatter",
    routes=True,
)
def overwrite(call: Call) -> Result:
    """Rarely used writes: followed only if nothing coloured is written."""
    x = call.arg(0, "input", "self")
    others = [key for key in call.layouts if key != id(x)]
    if call.name == "masked_scatter":
        return _masked_scatter(call, x, call.arg(1, "mask"), call.arg(2, "source"))
    if call.name in ("select_scatter", "slice_scatter", "diagonal_scatter"):
        return _replaced(call)
    if others:
        mask = call.arg(2, "index")
        if call.name == "index_fill" and others == [id(mask)] and call.layout(x) is not None:
            return call.layout(x)
        raise Mixing(f"{call.name} writes rows that hold samples")
    return call.layout(x)


def _masked_scatter(call: Call, x: Tensor, mask: Tensor, source: Tensor) -> Result:
    """The source's elements, in order, go where the mask holds."""
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
    mine = torch.full((1,) * x.dim(), -1, device=x.device)
    if layout is not None:
        mine = ids_of(layout, x.shape, call.n, x.device)
    colours = ids_of(brought, source.shape, call.n, x.device)
    if thin and (mine.shape[-1] != 1 or colours.shape[-1] != 1):
        raise Mixing("rows hold several samples")
    before = mine.expand(shape)
    rows = (*source.shape[:-1], 1) if thin else tuple(source.shape)
    holds = mask[..., :1] if thin else mask.expand(x.shape)
    after = before.clone().masked_scatter_(holds, colours.expand(rows).contiguous())
    return written(x, before, after, call.n)


def _replaced(call: Call) -> Result:
    """Colours by running the write on colours; a place may keep its colour or take one."""
    x = call.arg(0, "input", "self")
    outside = probed(call)
    layout = call.layout(x)
    if layout is None or not isinstance(outside, Layout):
        return outside  # type: ignore[return-value]
    return merge(layout, outside, x.shape, call.n)


@rule("combinations cartesian_prod cov corrcoef")
def crossing(call: Call) -> Result:
    """Every row meets every other row."""
    raise Mixing(f"{call.name} combines all rows")


@rule("trace")
def trace(call: Call) -> Result:
    """Sums a diagonal: both axes are used."""
    x = call.arg(0, "input")
    return carry(call, [(x, axes(None, x.dim()))], call.out)
