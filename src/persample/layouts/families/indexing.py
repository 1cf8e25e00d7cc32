"""Reading by index: colours move with the rows, whatever the indices say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import Mixing
from ..call import Call, Result, carry, other_sizes
from ..layout import Layout, align, explicit, ids_of, remap
from ..operators import rule
from ..reshaping import colour_groups, kept_axes
from ..subscript import expand_index, shrink_colours


@rule("getitem index", linear=True, routes=True)
def getitem(call: Call) -> Result:
    """``x[index]``."""
    x, index = call.args[0], call.args[1]
    if call.name == "index" and isinstance(index, list):
        index = tuple(slice(None) if i is None else i for i in index)
    entries = expand_index(index, x.dim())
    layout = call.layout(x)
    result = None if layout is None else _read_layout(layout, x, entries, call)
    layouts = call.layouts
    if result is None:
        entries, layouts = _indices_of_masks(call, entries)
    chosen = _index_colours(call, entries, layouts)
    if chosen is not None and not chosen.coupled:
        result = call.merge(result, chosen)
    return result


def _read_layout(layout: Layout, x: Tensor, entries: list[Any], call: Call) -> Layout:
    if not any(isinstance(e, (Tensor, bool)) for e in entries):
        places, rank = kept_axes(x.shape, lambda t: t[tuple(entries)])
        if all(places[d] is not None for d in layout.axes):
            return remap(layout, places, rank)
    ids = shrink_colours(call.colours(x), x.shape, entries)
    return call.painted(ids[tuple(entries)])


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
    if not coloured or any(e.dtype in (torch.bool, torch.uint8) for _, e in tensors):
        return None
    advanced = [k for k, e in enumerate(entries) if isinstance(e, (Tensor, int)) and e is not True]
    adjacent = advanced == list(range(advanced[0], advanced[-1] + 1))
    width = max(e.dim() for _, e in tensors)
    before = sum(1 for e in entries[: advanced[0]] if e is None or isinstance(e, slice))
    start = before if adjacent else 0
    found = []
    for entry in coloured:
        layout = layouts[id(entry)]
        shift = start + width - entry.dim()
        moved = remap(layout, [d + shift for d in range(entry.dim())], call.out.dim())
        if moved.ids is None and call.out.shape[moved.axis] != entry.shape[layout.axis]:
            raise Mixing("the index that holds the samples is broadcast")
        found.append(moved)
    return call.merge(*found)


@rule("index_select", linear=True, routes=True)
def index_select(call: Call) -> Result:
    """Rows along one axis; the index's own colours count where the source has none."""
    x, index = call.arg(0, "input", "self"), call.arg(2, "index")
    axis = call.arg(1, "dim") % max(x.dim(), 1)
    layout, chosen = call.layout(x), call.layout(index)
    if layout is not None and axis in layout.axes:
        layout = call.painted(call.colours(x).index_select(axis, index))
    if chosen is not None:
        chosen = remap(chosen, [axis], call.out.dim()) if index.dim() == 1 else None
    return call.merge(layout, chosen)


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
    if layout is not None and axis in layout.axes:
        full = call.colours(x).expand(x.shape)
        by_axis = call.name == "gather"
        layout = call.painted(
            full.gather(axis, index) if by_axis else full.take_along_dim(index, axis)
        )
    elif layout is not None and other_sizes(call.out, axis) != other_sizes(x, axis):
        ids = call.colours(x)
        whole = [d == axis or ids.size(d) == 1 for d in range(x.dim())]
        read = [slice(None if whole[d] else size) for d, size in enumerate(call.out.shape)]
        layout = explicit(ids[tuple(read)], call.n)
    brought = None if chosen is None else align(chosen, index.shape, call.out.shape, call.n)
    return call.merge(layout, brought)


@rule("take", linear=True, routes=True)
def take(call: Call) -> Result:
    """Indices into the flattened tensor."""
    x, index = call.arg(0, "input", "self"), call.arg(1, "index", "indices")
    layout = call.layout(x)
    if layout is not None:
        layout = call.painted(call.colours(x).expand(x.shape).take(index))
    return call.merge(layout, call.layout(index))


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
    return call.painted(ids.masked_select(mask))


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
    bags, rows, marks = len(call.out[0]), _common_rows(call, [index, weights]), call.layout(offsets)
    result = None if marks is None else remap(marks, [0], 2)
    if rows is not None:
        starts = offsets[:bags].to(torch.long)
        places = torch.arange(len(index), device=index.device)
        colours = colour_groups(
            torch.searchsorted(starts, places, right=True) - 1, rows, bags,
            why="a bag holds rows of several samples",
            fix="if each bag is a sample: record(..., constants=...) with the name of the input "
            "that holds the indices",
        )  # fmt: skip
        result = call.merge(explicit(colours.view(-1, 1), call.n), result)
    return [result, *[None] * (len(call.out) - 1)]


def _common_rows(call: Call, tensors: list[Any]) -> Tensor | None:
    """One colour per row of 1-D tensors that run in parallel."""
    first: Tensor = tensors[0]
    result = call.merge(*map(call.layout, tensors), out=first)
    if result is None:
        return None
    return ids_of(result, first.shape, call.n, first.device).expand(first.shape)


@rule("bincount", routes=True)
def bincount(call: Call) -> Result:
    """A bin belongs to the sample of the rows that are counted in it."""
    index = call.arg(0, "input", "self")
    rows = _common_rows(call, [index, call.arg(1, "weights")])
    if rows is None:
        return None
    why = "a bin counts rows of several samples"
    return explicit(colour_groups(index, rows, len(call.out), why=why), call.n)
