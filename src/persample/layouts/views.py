"""What a write into a tensor makes of others that look at the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import CONSTANT, Layout, closed, disagree, explicit, ids_of
from .reshaping import squeeze_colours


class Place(NamedTuple):
    """Which memory a tensor looks at, and how."""

    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


Written = Sequence[tuple[Place, Layout]]


def place_of(tensor: Tensor) -> Place:
    """Which memory a tensor looks at, and how."""
    return Place(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def whole_of(layout: Layout, view: Tensor, base: Tensor, n: int | None) -> Layout | None:
    """The layout of a tensor from that of a view that covers all of the samples' axis."""
    if n == 1:
        return Layout(0, 1, base.new_zeros((1,) * base.dim(), dtype=torch.long))
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
    if not (before is None or before is CONSTANT or isinstance(before, Layout)):
        return None
    known = [(place_of(base), before)] if isinstance(before, Layout) else []
    return _shown([*known, (place_of(view), layout)], place_of(base), base, n)


def shown_by(layout: Layout, place: Place, tensor: Tensor, n: int | None) -> Layout | None:
    """The layout of a tensor that shows elements of a place which was written to.

    None if it also shows others, or where elements of the place share memory.
    """
    return _shown([(place, layout)], place, tensor, n)


def _shown(written: Written, whole: Place, tensor: Tensor, n: int | None) -> Layout | None:
    colours = None if n is None else _colours(written, whole, tensor, n)
    if colours is None or n is None:
        return None
    coupled = next((layout.coupled for _, layout in reversed(written) if layout.coupled), None)
    return explicit(squeeze_colours(colours, n), n).with_coupling(coupled)


def colours_of(places: Mapping[Place, Layout], tensor: Tensor, n: int) -> Tensor | None:
    """The sample of each element of a tensor by what was written to its memory, -1 where nothing.

    None where writes disagree, or where it is not known which elements they wrote.
    """
    storage = tensor.untyped_storage()
    size = torch.Size((storage.nbytes() // tensor.element_size(),))
    whole = Place(storage.data_ptr(), size, (1,), tensor.dtype)
    return _colours(list(places.items()), whole, tensor, n)


def _colours(written: Written, whole: Place, tensor: Tensor, n: int) -> Tensor | None:
    """Lay colours out in the memory of a place as they were written; as a tensor shows them."""
    memory = torch.full((reach(whole.shape, whole.stride),), -1, device=tensor.device)

    def seen(place: Place) -> Tensor | None:
        start, rest = divmod(place.pointer - whole.pointer, tensor.element_size())
        inside = 0 <= start <= memory.numel() - reach(place.shape, place.stride)
        if rest or not inside or place.dtype != tensor.dtype:
            return None
        return memory.as_strided(place.shape, place.stride, start)

    for place, layout in written:
        before, new = seen(place), ids_of(layout, place.shape, n, tensor.device)
        if before is None or overlaps(place.shape, place.stride) or disagree(before, new):
            return None
        before.copy_(torch.maximum(before, new))
    return seen(place_of(tensor))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor of this shape."""
    return torch.empty(shape, device="meta").stride()


def reach(shape: torch.Size, stride: tuple[int, ...]) -> int:
    """How many elements of memory there are from a tensor's first to its last."""
    return 0 if 0 in shape else 1 + sum((s - 1) * t for s, t in zip(shape, stride, strict=True))


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether one element may stand for several (an expanded tensor, overlapping windows)."""
    far = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step < far:
            return True
        far = max(far, step * (size - 1) + far)
    return False
