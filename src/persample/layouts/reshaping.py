"""Colours through a change of shape, in as few axes as possible."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import Mixing
from .layout import Layout, Shape, closed, disagree, explicit, ids_of, one_colour


def reshape(layout: Layout, old: Shape, new: Shape, n: int, device: torch.device) -> Layout:
    """Follow a reshape (row-major order is kept)."""
    if 0 in new and (layout.ids is None or n == 0):
        return closed(_axis_of_nothing(layout, old, new, n))
    if 0 in new:
        return Layout(0, 1, torch.full((1,) * len(new), -1, device=device))
    if layout.ids is not None:
        return _reshape_ids(layout.ids, old, new, n)
    stride = layout.inner * math.prod(old[layout.axis + 1 :])
    post = 1
    for d in range(len(new) - 1, -1, -1):
        if stride % post == 0:
            inner = stride // post
            if new[d] % (inner * n) == 0 and inner * n <= new[d]:
                return closed(d, inner)
        post *= new[d]
    return _reshape_ids(ids_of(layout, old, n, device), old, new, n)


def _axis_of_nothing(layout: Layout, old: Shape, new: Shape, n: int) -> int:
    """There is nothing to colour: where samples were, an axis of n before it, or an empty one."""
    before = list(new[: layout.axis + 1]) if n else []
    if len(before) > layout.axis and before[-1] == old[layout.axis]:
        return layout.axis
    return before.index(n) if n in before else list(new).index(0)


def _reshape_ids(ids: Tensor, old: Shape, new: Shape, n: int) -> Layout:
    """Regroup axes; only groups in which the colour changes are written out."""
    pieces: list[int] = []
    view: list[int] = []
    for olds, news in _groups(old, new):
        thin = all(ids.size(d) == 1 for d in olds)
        pieces += [1 if thin else old[d] for d in olds]
        view += [1 if thin else new[d] for d in news]
    full = ids.expand(pieces).reshape(view)
    return explicit(squeeze_colours(full, n), n)


_APART = (1 << 31) - 1  # no stride that comes about by chance


def kept_axes(shape: Shape, view: Callable[[Tensor], Any]) -> tuple[list[int | None], int]:
    """Where a view (or the first of several) has each axis as a whole, else None; and its rank.

    It is taken of a tensor without memory, whose strides tell its axes apart: they move with them.
    """
    axes = [(_APART + d, size) for d, size in enumerate(shape)]
    strides = [stride for stride, _ in axes]
    out = view(torch.empty_strided(shape, strides, dtype=torch.int8, device="meta"))
    first: Tensor = out if isinstance(out, Tensor) else out[0]
    seen = list(zip(first.stride(), first.shape, strict=True))
    return [seen.index(axis) if axis in seen else None for axis in axes], first.dim()


def squeeze_colours(ids: Tensor, n: int) -> Tensor:
    """Shrink to size one every axis along which the colour does not change.

    -1 takes the colour of its neighbours only where that leaves every sample a place of its own:
    a buffer that holds rows of some samples so far may be given the others' rows later.
    """
    for d in range(ids.dim()):
        if ids.size(d) > 1:
            if ids.stride(d) == 0:
                ids = ids.narrow(d, 0, 1)
                continue
            top = ids.amax(d, keepdim=True)
            same = ids == top
            if bool(same.all()) or (
                bool((same | (ids < 0)).all())
                and torch.unique(top).numel() == n
                and bool((top >= 0).all())
            ):
                ids = top
    return _on_one_axis(ids, n)


def paint(
    before: Tensor, places: Tensor, colours: Tensor,
    why: str = "rows of several samples are written to one place", fix: str = "",
) -> Tensor:  # fmt: skip
    """Colours after a write to these places of the flattened target; -1 leaves a place as it is."""
    flat, where, new = before.flatten(), places.flatten(), colours.flatten()
    after = flat.scatter_reduce(0, where, new, "amax", include_self=True)
    if disagree(new, after[where]):
        raise Mixing(why, fix)
    return after.view(before.shape)


def colour_groups(groups: Tensor, rows: Tensor, count: int, *, why: str, fix: str = "") -> Tensor:
    """The sample of every group, from those of its rows; -1 where a group has none."""
    return paint(torch.full((count,), -1, device=rows.device), groups, rows, why, fix)


def place_in_groups(groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The place of every row among those of its group, and how many rows each group has."""
    order = torch.argsort(groups, stable=True)
    sizes = torch.bincount(groups, minlength=count)
    places, starts = torch.empty_like(order), sizes.cumsum(0) - sizes
    places[order] = torch.arange(len(order), device=groups.device) - starts[groups[order]]
    return places, sizes


def _on_one_axis(ids: Tensor, n: int) -> Tensor:
    """One axis that has all colours, where -1 fills up rows and columns of the others."""
    wide = [d for d, size in enumerate(ids.shape) if size > 1]
    if len(wide) < 2 or not bool((ids < 0).any()):
        return ids
    for axis in wide:
        top = one_colour(ids, [d for d in wide if d != axis])
        if top is not None and bool((top >= 0).all()) and torch.unique(top).numel() == n:
            return top
    return ids


def _groups(old: Shape, new: Shape) -> list[tuple[range, range]]:
    """Split both shapes into the smallest runs of axes with equal products."""
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        first, second = i, j
        a, i = (old[i], i + 1) if i < len(old) else (1, i)
        b, j = (new[j], j + 1) if j < len(new) else (1, j)
        while a != b:
            if (a < b and i < len(old)) or j >= len(new):
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        groups.append((range(first, i), range(second, j)))
    return groups
