"""Reading by index: colours move with the rows, whatever the indices say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import Call, Result, carry, other_sizes
from ..layout import Layout, align, explicit, ids_of, remap
from ..operators import rule
from ..reshaping import colour_groups, kept_axes
from .shape import probe_layouts


def entries_of(call: Call, x: Tensor) -> list[Any]:
    """What stands between the brackets: one entry per consumed axis (None entries add axes)."""
    index = call.arg(1, "indices")
    if not call.name.endswith("item"):  # aten writes None for an axis as it is
        index = tuple(slice(None) if i is None else i for i in index)
    entries = list(index) if isinstance(index, tuple) or _stands_for_tuple(index) else [index]
    entries = [torch.as_tensor(e) if isinstance(e, list) else e for e in entries]
    fill = [slice(None)] * (x.dim() - sum(_consumed(entry) for entry in entries))
    for at, entry in enumerate(entries):
        if entry is Ellipsis:
            return entries[:at] + fill + entries[at + 1 :]
    return entries + fill


def _stands_for_tuple(index: Any) -> bool:
    """Whether torch takes a list for a tuple: it holds more than numbers, and is short."""
    return (
        isinstance(index, list)
        and len(index) < 32
        and any(
            e is None
            or e is Ellipsis
            or isinstance(e, (slice, Tensor, Sequence))
            or type(e).__name__ == "ndarray"
            for e in index
        )
    )


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8)


def _consumed(entry: Any) -> int:
    """How many axes an entry stands for; masks, for all of theirs."""
    if _is_mask(entry):
        return int(entry.dim())
    return 0 if entry is None or entry is Ellipsis or isinstance(entry, bool) else 1


@rule("getitem index", linear=True, routes=True)
def getitem(call: Call) -> Result:
    """``x[index]``: where rows of samples are chosen, masks say nothing of their own."""
    x = call.args[0]
    entries, layout = entries_of(call, x), call.layout(x)
    found = None if layout is None else _read_layout(layout, x, entries, call)
    if found is not None and any(_is_mask(entry) for entry in entries):
        return found
    return call.merge(found, *_index_colours(call, x, entries))


def _read_layout(layout: Layout, x: Tensor, entries: list[Any], call: Call) -> Layout:
    if not any(isinstance(e, (Tensor, bool)) for e in entries):
        places, rank = kept_axes(x.shape, lambda t: t[tuple(entries)])
        if all(places[d] is not None for d in layout.axes):
            return remap(layout, places, rank)
    ids, sizes, axis = call.colours(x), list(x.shape), 0
    for entry in entries:  # one element will do where all of a colourless axis is taken
        if isinstance(entry, slice) and entry == slice(None) and ids.size(axis) == 1:
            sizes[axis] = 1
        axis += _consumed(entry)
    return call.painted(ids.expand(sizes)[tuple(entries)])


def _index_colours(call: Call, x: Tensor, entries: list[Any]) -> list[Layout]:
    """What coloured indices bring along: a row looked up for sample i is of i.

    The samples' numbers are read in place of rows, from a tensor that has them along their axis.
    """
    if all(call.layout(entry) is None for entry in entries):
        return []
    pairs = [pair for entry in entries for pair in _with_samples(call, entry)]
    read = [slice(None) if isinstance(entry, slice) else entry for entry, _ in pairs]
    used = [entry for entry in read if _consumed(entry)]
    sizes = [1 if isinstance(e, slice) else s for e, s in zip(used, x.shape, strict=True)]
    found = []
    for k, (_, own) in enumerate(pairs):
        if own is not None:
            axis = sum(_consumed(entry) for entry in read[:k])
            samples = torch.arange(-1, call.n + 1, device=own.device)
            table = samples.view(-1, *[1] * (len(sizes) - axis - 1))
            table = table.expand(*sizes[:axis], len(samples), *sizes[axis + 1 :])
            found.append(call.painted(table[(*read[:k], own + 1, *read[k + 1 :])]))
    return found


def _with_samples(call: Call, entry: Any) -> list[tuple[Any, Tensor | None]]:
    """An entry and whose its elements are; masks as the indices that they stand for."""
    ids = None
    if call.layout(entry) is not None and _consumed(entry):
        ids = call.colours(entry).clamp(min=-1).expand(entry.shape)
    if not _is_mask(entry) or not entry.dim():
        return [(entry, ids)]
    chosen = entry.bool()
    own = None if ids is None else ids[chosen]
    return [(index, own) for index in chosen.nonzero(as_tuple=True)]


@rule("index_select", linear=True, routes=True)
def index_select(call: Call) -> Result:
    """Rows along one axis; the index's own colours count where the source has none."""
    x, index = call.arg(0, "input", "self"), call.arg(2, "index")
    axis = call.arg(1, "dim") % max(x.dim(), 1)
    layout, chosen = call.layout(x), call.layout(index)
    if layout is not None and axis in layout.axes:
        layout = call.painted(call.colours(x).index_select(axis, index))
    if chosen is not None:
        chosen = remap(chosen, [axis] * index.dim(), call.out.dim())
    return call.merge(layout, chosen)


@rule("gather take_along_dim take", linear=True, routes=True)
def gather(call: Call) -> Result:
    """Off the gathered axis, rows keep their position; without an axis, all of it is one."""
    x, (dim, at) = call.arg(0, "input", "self"), _AXIS_AND_INDEX[call.name]
    index, dim = call.arg(at, "index", "indices"), call.arg(dim, "dim")
    layout, chosen = call.layout(x), call.layout(index)
    if layout is not None and dim is None:
        layout = call.painted(call.colours(x).expand(x.shape).take(index))
    elif layout is not None:
        axis = dim % max(x.dim(), 1)
        if axis in layout.axes or other_sizes(call.out, axis) != other_sizes(x, axis):
            layout = probe_layouts(call)  # type: ignore[assignment]
    brought = None if chosen is None else align(chosen, index.shape, call.out.shape, call.n)
    return call.merge(layout, brought)


_AXIS_AND_INDEX = {"gather": (1, 2), "take_along_dim": (2, 1), "take": (2, 1)}


@rule("masked_select", linear=True, routes=True)
def masked_select(call: Call) -> Result:
    """Rows where the mask holds; its own colours count where the source has none."""
    x, mask = call.arg(0, "input", "self"), call.arg(1, "mask")
    holder = x if call.layout(x) is not None else mask
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return call.painted(call.colours(holder).expand(shape).masked_select(mask))


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
