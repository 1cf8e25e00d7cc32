"""Reading by index: colours move with the rows, whatever the indices say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import Mixing
from ..call import Call, Result, carry
from ..layout import Layout, align, explicit, ids_of, merge, remap
from ..operators import rule
from ..reshaping import squeeze_colours
from ..subscript import expand_index, is_full, shrink_colours


@rule("getitem index", linear=True, routes=True)
def getitem(call: Call) -> Result:
    """``x[index]``."""
    x, index = call.args[0], call.args[1]
    if call.name == "index" and isinstance(index, list):
        index = tuple(slice(None) if i is None else i for i in index)
    entries = expand_index(index, x.dim())
    layout = call.layout(x)
    result: Layout | None = None
    if layout is not None:
        result = _read_layout(layout, x, entries, call)
    layouts = call.layouts
    if result is None:
        entries, layouts = _indices_of_masks(call, entries)
    chosen = _index_colours(call, entries, layouts)
    if chosen is not None and not chosen.coupled:
        result = chosen if result is None else merge(result, chosen, call.out.shape, call.n)
    if result is not None and result.ids is not None and result.ids.dim() != call.out.dim():
        raise Mixing("torch reads the index in another way")
    return result


def _read_layout(layout: Layout, x: Tensor, entries: list[Any], call: Call) -> Layout:
    if not any(isinstance(e, Tensor) for e in entries):
        places: list[int | None] = []
        axis, new, touched = 0, 0, set()
        for entry in entries:
            if entry is None:
                new += 1
                continue
            if not is_full(entry):
                touched.add(axis)
            if isinstance(entry, slice):
                places.append(new)
                new += 1
            else:
                places.append(None)
            axis += 1
        if not any(d in touched for d in layout.axes) and new == call.out.dim():
            return remap(layout, places, new)
    ids = shrink_colours(ids_of(layout, x.shape, call.n, x.device), x.shape, entries)
    return explicit(squeeze_colours(ids[tuple(entries)], call.n), call.n)


def _indices_of_masks(call: Call, entries: list[Any]) -> tuple[list[Any], dict[int, Layout]]:
    """Masks that hold samples as the indices they stand for, and the layouts of all indices."""
    found: list[Any] = []
    layouts = dict(call.layouts)
    for entry in entries:
        layout = call.layout(entry) if isinstance(entry, Tensor) else None
        if layout is None or entry.dtype not in (torch.bool, torch.uint8) or not entry.dim():
            found.append(entry)
            continue
        chosen = entry.bool()
        ids = ids_of(layout, entry.shape, call.n, entry.device).expand(entry.shape)[chosen]
        colours = explicit(ids, call.n).with_coupling(layout.coupled)
        for index in chosen.nonzero(as_tuple=True):
            layouts[id(index)] = colours
            found.append(index)
    return found, layouts


def _index_colours(call: Call, entries: list[Any], layouts: dict[int, Layout]) -> Layout | None:
    """The colours that integer indices bring along: a row looked up for sample i is of i."""
    tensors = [(k, e) for k, e in enumerate(entries) if isinstance(e, Tensor)]
    coloured = [e for _, e in tensors if id(e) in layouts]
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
        layout = layouts[id(entry)]
        shift = start + width - entry.dim()
        moved = remap(layout, [d + shift for d in range(entry.dim())], call.out.dim())
        if moved.ids is None and call.out.shape[moved.axis] != entry.shape[layout.axis]:
            raise Mixing("the index that holds the samples is broadcast")
        result = moved if result is None else merge(result, moved, call.out.shape, call.n)
    return result


@rule("index_select", linear=True, routes=True)
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
            return take(call)  # type: ignore[return-value]
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
    x, index = call.arg(0, "input", "self"), call.arg(1, "index", "indices")
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
    """Rows where the mask holds; its own colours count where the source has none."""
    x, mask = call.arg(0, "input", "self"), call.arg(1, "mask")
    holder = x if call.layout(x) is not None else mask
    layout = call.layout(holder)
    if layout is None or layout.coupled:
        return None
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    ids = ids_of(align(layout, holder.shape, shape, call.n), shape, call.n, x.device).expand(shape)
    return explicit(squeeze_colours(ids.masked_select(mask), call.n), call.n)


@rule("embedding", routes=True)
def embedding(call: Call) -> Result:
    """A row of the table for every index."""
    index = call.arg(1, "indices", "input")
    return carry(call, [(index, ())], call.out, {call.out.dim() - 1})


@rule("embedding_renorm")
def embedding_renorm(call: Call) -> Result:
    """Rows that are looked up are shortened, for whoever looks them up: still a table."""
    return None


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
            raise Mixing(
                "a bag holds rows of several samples",
                "if each bag is a sample: record(..., constants=...) with the name of the input "
                "that holds the indices",
            )
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


@rule("bincount", routes=True)
def bincount(call: Call) -> Result:
    """A bin belongs to the sample of the rows that are counted in it."""
    index = call.arg(0, "input", "self")
    rows = _common_rows(call, [index, call.arg(1, "weights")])
    if rows is None:
        return None
    colours = torch.full(call.out.shape, -1, device=index.device)
    colours[index] = rows
    if bool((colours[index] != rows).any()):
        raise Mixing("a bin counts rows of several samples")
    return explicit(colours, call.n)


@rule("combinations cartesian_prod cov corrcoef")
def crossing(call: Call) -> Result:
    """Every row is combined with every other row."""
    raise Mixing(f"{call.name} combines all rows")
