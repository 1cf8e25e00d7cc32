"""What a write into a tensor makes of others that look at the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import CONSTANT, Layout, closed, explicit, ids_of
from .reshaping import squeeze_colours


class Place(NamedTuple):
    """Which memory a tensor looks at, and how."""

    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def whole_of(layout: Layout, view: Tensor, base: Tensor, n: int | None) -> Layout | None:
    """The layout of a tensor from that of a view that covers all of the samples' axis."""
    if n == 1:
        ids = torch.zeros((1,) * base.dim(), dtype=torch.long, device=base.device)
        return Layout(0, 1, ids)
    if layout.ids is not None:
        return layout if view.shape == base.shape and view.stride() == base.stride() else None
    size, stride = view.shape[layout.axis], view.stride(layout.axis)
    places = [d for d in range(base.dim()) if base.stride(d) == stride and base.shape[d] == size]
    return closed(places[0], layout.inner) if len(places) == 1 and size != 1 else None


def painted_through(
    layout: Layout, view: Tensor, base: Tensor, before: object, n: int | None
) -> Layout | None:
    """The layout of a tensor from the colours of each element, its own and the view's.

    None where they say different things, or where it is not known which elements a view shows.
    """
    if n is None or not (before is None or before is CONSTANT or isinstance(before, Layout)):
        return None
    start = view.storage_offset() - base.storage_offset()
    if (
        view.dtype != base.dtype
        or start < 0
        or start + reach(view.shape, view.stride()) > reach(base.shape, base.stride())
    ):
        return None
    if any(
        size > 1 and stride == 0 for size, stride in zip(base.shape, base.stride(), strict=True)
    ):
        return None
    colours = torch.empty_strided(
        base.shape, base.stride(), dtype=torch.long, device=base.device
    ).fill_(-1)
    if isinstance(before, Layout):
        colours.copy_(ids_of(before, base.shape, n, base.device).expand(base.shape))
    seen = colours.as_strided(view.shape, view.stride(), start)
    new = ids_of(layout, view.shape, n, view.device).expand(view.shape)
    if bool(((seen >= 0) & (new >= 0) & (seen != new)).any()):
        return None
    seen.copy_(torch.maximum(seen, new))
    found = explicit(squeeze_colours(colours, n), n)
    coupled = before.coupled if isinstance(before, Layout) else None
    return found.with_coupling(layout.coupled or coupled)


def shown_by(layout: Layout, place: Place, tensor: Tensor, n: int | None) -> Layout | None:
    """The layout of a tensor that shows elements of a place which was written to.

    None if it also shows others, or where elements of the place share memory.
    """
    bytes_before = tensor.data_ptr() - place.pointer
    start, rest = divmod(bytes_before, tensor.element_size())
    whole = reach(place.shape, place.stride)
    if n is None or tensor.dtype != place.dtype or rest or 0 in place.stride:
        return None
    if start < 0 or start + reach(tensor.shape, tensor.stride()) > whole:
        return None
    memory = torch.full((whole,), -1, device=tensor.device)
    written = memory.as_strided(place.shape, place.stride)
    written.copy_(ids_of(layout, place.shape, n, tensor.device).expand(place.shape))
    colours = memory.as_strided(tensor.shape, tensor.stride(), start)
    return explicit(squeeze_colours(colours, n), n).with_coupling(layout.coupled)


def colours_of(places: Mapping[Place, Layout], tensor: Tensor, n: int) -> Tensor | None:
    """The sample of each element of a tensor by what was written to its memory, -1 where nothing.

    None where writes disagree, or where it is not known which elements they wrote.
    """
    memory, size = tensor.untyped_storage(), tensor.element_size()
    colours = torch.full((memory.nbytes() // size,), -1, device=tensor.device)
    for place, layout in places.items():
        start, rest = divmod(place.pointer - memory.data_ptr(), size)
        if rest or place.dtype != tensor.dtype or 0 in place.stride:
            return None
        seen = colours.as_strided(place.shape, place.stride, start)
        new = ids_of(layout, place.shape, n, tensor.device).expand(place.shape)
        if bool(((seen >= 0) & (new >= 0) & (seen != new)).any()):
            return None
        seen.copy_(torch.maximum(seen, new))
    return colours.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor of this shape."""
    return torch.empty(shape, device="meta").stride()


def reach(shape: torch.Size, stride: tuple[int, ...]) -> int:
    """How many elements of memory there are from a tensor's first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((s - 1) * t for s, t in zip(shape, stride, strict=True))
