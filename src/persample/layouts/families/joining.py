"""Operators that join, repeat, turn or pad tensors, or make them from numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import Mixing
from ..call import Call, Result, axes, carry
from ..layout import Layout, closed, explicit, ids_of, with_hints
from ..operators import CONSTANT, rule
from .shape import probe, probe_layouts, source_of


@rule("repeat tile", linear=True)
def repeat(call: Call) -> Result:
    """Repeating the sample axis as a whole keeps index % n."""
    x, layout = source_of(call)
    shift = call.out.dim() - x.dim()
    if layout.ids is None:
        return closed(layout.axis + shift, layout.inner)
    ids = layout.ids.view((1,) * shift + tuple(layout.ids.shape))
    tiles = [
        o // i if c != 1 else 1
        for o, i, c in zip(call.out.shape, (1,) * shift + tuple(x.shape), ids.shape, strict=True)
    ]
    return explicit(ids.repeat(tiles), call.n)


@rule("repeat_interleave", linear=True, routes=True)
def repeat_interleave(call: Call) -> Result:
    """Repeats of the sample axis multiply ``inner``."""
    x = call.arg(0, "input", "self")
    layout, repeats, dim = call.layout(x), call.arg(1, "repeats"), call.arg(2, "dim")
    if layout is None or (dim is not None and dim % x.dim() not in layout.axes):
        return layout
    if dim is not None and isinstance(repeats, int) and layout.ids is None:
        return closed(layout.axis, layout.inner * repeats)
    return probe_layouts(call)  # type: ignore[return-value]


_TURNED = {"fliplr": (1,), "flipud": (0,), "rot90": (0, 1)}  # unless a call names axes


@rule("flip fliplr flipud roll rot90", linear=True)
def rotate(call: Call) -> Result | list[Result]:
    """Axes without samples may be turned freely."""
    x, layout = source_of(call)
    named = call.arg(2, "dims") or _TURNED.get(call.name)
    dims = axes(call.ints(1, "dims") if call.name == "flip" else named, x.dim())
    if not any(d in dims for d in layout.axes):
        return layout
    return probe_layouts(call)


@rule("cat concat concatenate stack hstack vstack dstack column_stack row_stack", linear=True)
def join(call: Call) -> Result:
    """Along another axis the pieces must agree; along the samples' axis colours are joined."""
    tensors = call.arg(0, "tensors")
    if call.name in ("cat", "concat", "concatenate", "stack"):
        dim = call.arg(1, "dim", "axis", default=0)
        if call.name != "stack":  # cat passes over tensors of shape (0,)
            tensors = [t for t in tensors if t.numel() + t.dim() != 1]
        rank = max((t.dim() for t in tensors), default=1) + (call.name == "stack")
        dim %= rank
        layouts = [v for t in tensors if (v := call.layout(t)) is not None]
        if all(v.ids is None for v in layouts):  # pieces of single samples need a closer look
            if call.name == "stack":
                return carry(call, [(t, ()) for t in tensors], call.out, {dim})
            if all(dim not in v.axes for v in layouts):
                return carry(call, [(t, {dim}) for t in tensors], call.out, {dim})
        elif call.name != "stack" and all(v.axes and dim not in v.axes for v in layouts):
            with contextlib.suppress(Mixing):  # the same rows beside each other, and constants
                return carry(call, [(t, {dim}) for t in tensors], call.out, {dim})
    return _side_by_side(call, tensors)


def _side_by_side(call: Call, tensors: Sequence[Tensor]) -> Result:
    """Pieces keep their colours; padding within a sample's piece, or around it, has a hint."""
    layouts = dict(call.layouts)
    for tensor in tensors:
        layout = layouts.get(id(tensor))
        if layout is not None and layout.ids is not None:
            layouts[id(tensor)] = Layout(layout.axis, 1, with_hints(layout.ids))
    inner = Call(call.name, call.func, call.args, call.kwargs, call.out, layouts, call.n)
    colours = probe(inner)
    return explicit(with_hints(colours), call.n)


@rule("pad_sequence", linear=True)
def pad_sequence(call: Call) -> Result:
    """Sequences side by side; padding belongs to no sample."""
    sequences, first = call.arg(0, "sequences"), bool(call.arg(1, "batch_first", default=False))
    side = call.arg(3, "padding_side", default="right")
    thin = [s[(slice(None), *[slice(0, 1)] * (s.dim() - 1))] for s in sequences]
    layouts = {}
    for piece, sequence in zip(thin, sequences, strict=True):
        layout = call.layout(sequence)
        if layout is not None:
            if any(d > 0 for d in layout.axes):
                raise Mixing("the sequences hold several samples each")
            ids = ids_of(layout, sequence.shape, call.n, sequence.device)
            layouts[id(piece)] = explicit(ids, call.n)
    inner = Call(call.name, call.func, (thin, first, 0.0, side), {}, call.out, layouts, call.n)
    return probe_layouts(inner)  # type: ignore[return-value]


rule("diag diag_embed diagflat block_diag", linear=True)(probe_layouts)


@rule("kron")
def kron(call: Call) -> Result:
    """Only one factor may hold samples: its index is the slow (or fast) one on the axis."""
    a, b = call.arg(0, "input"), call.arg(1, "other")
    if a.dim() != b.dim():
        raise Mixing("kron of tensors of different rank")
    for x, fast in ((a, b), (b, None)):
        layout = call.layout(x)
        if layout is not None and layout.ids is None and len(call.layouts) == 1 and a is not b:
            factor = fast.shape[layout.axis] if fast is not None else 1
            return closed(layout.axis, layout.inner * factor)
    raise Mixing("both factors hold samples")


@rule("pad constant_pad_nd", linear=True)
def pad(call: Call) -> Result:
    """Padding the samples' own axis with a constant adds rows of no sample."""
    x, layout = source_of(call)
    widths = call.arg(1, "pad")
    padded = {
        x.dim() - 1 - k for k in range(len(widths) // 2) if widths[2 * k] or widths[2 * k + 1]
    }
    if not any(d in padded for d in layout.axes):
        return layout
    mode = call.arg(2, "mode", default="constant")
    if call.name == "pad" and mode != "constant":
        raise Mixing(f"{mode} padding of the axis that holds the samples")
    small = ids_of(layout, x.shape, call.n, x.device) + 1
    keep = [w if (x.dim() - 1 - k // 2) in layout.axes else 0 for k, w in enumerate(widths)]
    return explicit(with_hints(torch.constant_pad_nd(small, keep, 0) - 1), call.n)


@rule("tensor new_tensor new as_tensor asarray", linear=True)
def copied(call: Call) -> Result:
    """``torch.tensor(h)``, ``torch.tensor([h[0], 1.0])``: values are copied, without gradient."""
    data = call.arg(1 if call.name.startswith("new") else 0, "data", "obj")
    if isinstance(data, Tensor):
        return call.layout(data)
    found = [_colours(call, item) for item in data] if isinstance(data, (list, tuple)) else []
    if not any(bool((ids >= 0).any()) for ids in found):
        return None
    return call.painted(torch.stack(found))


def _colours(call: Call, item: Any) -> Tensor:
    """The sample of every number in nested lists, in the shape of the tensor they become."""
    if isinstance(item, Tensor):
        return call.colours(item).cpu().expand(item.shape)
    if isinstance(item, (list, tuple)) and item:
        return torch.stack([_colours(call, inner) for inner in item])
    return torch.full((0,) if isinstance(item, (list, tuple)) else (), -1)


_FILLED = "full full_like new_full scalar_tensor linspace logspace arange"


@rule(_FILLED, routes=True)
def fill(call: Call) -> Result:
    """Numbers that every element is made of; integers are treated as constants, like sizes."""
    given = call.tensors()
    values = given[1:] if call.name in ("full_like", "new_full", "fill") else given
    real = [value for value in values if value.is_floating_point() or value.is_complex()]
    colours = [call.colours(value).flatten().tolist() for value in real]
    owners = {owner for each in colours for owner in each if owner >= 0}
    if not owners:
        return None
    if len(owners) > 1:
        raise Mixing("a value that holds samples is written to every element")
    out: Tensor = call.out
    return Layout(0, 1, torch.full((1,) * out.dim(), owners.pop(), device=out.device))


rule("fill")(fill)  # ``x.fill_(value)``: whatever x was is gone
CONSTANT.update(("tensor", "new_tensor", "new", *_FILLED.split()))
