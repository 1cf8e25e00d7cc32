"""Operators that join, repeat, turn or pad tensors, or make them from numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import Mixing
from ..call import Call, Result, carry
from ..layout import Layout, explicit, with_hints
from ..operators import CONSTANT, rule
from .shape import probe, probe_layouts, source_of


@rule("repeat_interleave", linear=True, routes=True)
def repeat_interleave(call: Call) -> Result:
    """Along another axis than the samples' their place stays."""
    x, dim = call.arg(0, "input", "self"), call.arg(2, "dim")
    layout = call.layout(x)
    if layout is not None and call.arg(1, "repeats") is None:  # the places of what is repeated
        return call.painted(call.colours(x).expand(x.shape).repeat_interleave(x))
    if layout is None or (dim is not None and dim % x.dim() not in layout.axes):
        return layout
    return probe_layouts(call)  # type: ignore[return-value]


@rule("cat concat concatenate stack hstack vstack dstack column_stack row_stack", linear=True)
def join(call: Call) -> Result:
    """Along another axis the pieces must agree; along the samples' axis colours are joined."""
    tensors, stacked = call.arg(0, "tensors"), call.name == "stack"
    if stacked or call.name in ("cat", "concat", "concatenate"):
        dim = call.arg(1, "dim", "axis", default=0)
        if not stacked:  # cat passes over tensors of shape (0,)
            tensors = [t for t in tensors if t.numel() + t.dim() != 1]
        dim %= max((t.dim() for t in tensors), default=1) + stacked
        layouts = [v for t in tensors if (v := call.layout(t)) is not None]
        closed = all(v.ids is None for v in layouts)
        if closed if stacked else all(v.axes and dim not in v.axes for v in layouts):
            try:
                pieces = [(t, () if stacked else (dim,)) for t in tensors]
                return carry(call, pieces, call.out, {dim})
            except Mixing:  # pieces of single samples need a closer look
                if closed:
                    raise
    return _side_by_side(call, tensors)


def _side_by_side(call: Call, tensors: Sequence[Tensor]) -> Result:
    """Pieces keep their colours; padding within a sample's piece, or around it, has a hint."""
    for tensor in tensors:
        layout = call.layout(tensor)
        if layout is not None and layout.ids is not None:
            call.layouts[id(tensor)] = Layout(0, 1, with_hints(layout.ids))
    return explicit(with_hints(probe(call)), call.n)


@rule("pad_sequence", linear=True)
def pad_sequence(call: Call) -> Result:
    """Sequences side by side, as their colours are; padding belongs to no sample."""
    sequences, first = call.arg(0, "sequences"), bool(call.arg(1, "batch_first", default=False))
    side, rows = call.arg(3, "padding_side", default="right"), []
    for sequence in sequences:
        ids = call.colours(sequence)
        if ids.numel() != ids.shape[0]:
            raise Mixing("the sequences hold several samples each")
        rows.append(ids.flatten().expand(sequence.shape[0]))
    padded = call.func(rows, first, -1, side)
    return explicit(padded.view(*padded.shape, *[1] * (call.out.dim() - 2)), call.n)


@rule("kron")
def kron(call: Call) -> Result:
    """A product of every two elements: one factor's colours among elements of the other."""
    a, b = call.arg(0, "input"), call.arg(1, "other")
    blank = [torch.zeros_like(t, dtype=torch.long) for t in (a, b)]
    left = torch.kron(call.colours(a).expand(a.shape) + 1, blank[1] + 1)
    right = torch.kron(blank[0] + 1, call.colours(b).expand(b.shape) + 1)
    return call.merge(call.painted(left - 1), call.painted(right - 1))


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
    keep = [w if (x.dim() - 1 - k // 2) in layout.axes else 0 for k, w in enumerate(widths)]
    return explicit(with_hints(torch.constant_pad_nd(call.colours(x), keep, -1)), call.n)


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
    return Layout(0, 1, torch.full((1,) * call.out.dim(), owners.pop(), device=call.out.device))


rule("fill")(fill)  # ``x.fill_(value)``: whatever x was is gone
CONSTANT.update(("tensor", "new_tensor", "new", *_FILLED.split()))
