"""Where the samples sit in a tensor.

A layout colours every element with the sample it belongs to. Two representations:

* closed: on one ``axis`` of size outer * n * inner, index ``j`` belongs to ``(j // inner) % n``;
* explicit: ``ids``, an integer tensor broadcastable to the tensor, negative where no sample is
  meant: -1, or -2 - i for a constant beside elements of sample i.

A constant has no layout, and may be coloured freely. What the colours assert: an element with
colour i has been computed from elements of colour i and constants only. If the losses are coloured
0..n-1, then no path of the graph leads from an element of colour i to a loss of another colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import Mixing, Reason

Shape = Sequence[int]
Found = TypeVar("Found")
NAME_IT = (
    "if one of them is not per-sample data (a mask, position ids), name it in "
    "record(..., constants=...)"
)


class Layout:
    """Immutable; closed layouts are interned by :func:`closed`."""

    __slots__ = ("_found", "axis", "coupled", "ids", "inner")

    def __init__(
        self, axis: int, inner: int = 1, ids: Tensor | None = None, coupled: Reason | None = None
    ) -> None:
        self.axis, self.inner, self.ids, self.coupled = axis, inner, ids, coupled
        self._found: dict[Any, Any] | None = None

    def __repr__(self) -> str:
        if self.ids is None:
            text = f"axis {self.axis}" + (f", inner {self.inner}" if self.inner != 1 else "")
        else:
            text = f"ids {tuple(self.ids.shape)}"
        return f"Layout({text}{', coupled' if self.coupled else ''})"

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which the colour changes."""
        if self.ids is None:
            return (self.axis,)
        return tuple(d for d, size in enumerate(self.ids.shape) if size != 1)

    def once(self, key: Any, compute: Callable[[], Found]) -> Found:
        """What is computed from explicit ids, kept for all tensors that have them."""
        found = self._found = {} if self._found is None else self._found
        if key not in found:
            found[key] = compute()
        value: Found = found[key]
        return value

    @property
    def owned(self) -> bool:
        """Whether every row is some sample's."""
        ids = self.ids
        return ids is None or self.once("owned", lambda: not bool((ids < 0).any()))

    def with_coupling(self, reason: Reason | None) -> Layout:
        """The same colours, remembering that the values depend on the whole batch."""
        if reason is None or self.coupled is not None:
            return self
        return Layout(self.axis, self.inner, self.ids, reason)

    def plain(self) -> Layout:
        """The same colours without the memory of coupling."""
        return closed(self.axis, self.inner) if self.ids is None else Layout(0, 1, self.ids)


@dataclass(frozen=True, slots=True)
class Additive:
    """A sum over samples of terms that each belong to one sample (a mean loss, for instance)."""

    coupled: Reason | None = None

    def with_coupling(self, reason: Reason | None) -> Additive:
        """The same, remembering that the values depend on the whole batch."""
        return self if self.coupled is not None else Additive(reason)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Elements that belong to several samples, or to unknown ones."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Earlier(Mixed):
    """With a graph from before the block: it cannot be followed, but without it is a constant."""


class Constant:
    """Seen by the recorder, carries a gradient history, depends on no sample and no parameter."""

    __slots__ = ()


CONSTANT = Constant()
PURE = Constant()  # of parameters alone, without gradients: a custom function's result, maybe
State = Layout | Additive | Mixed | Constant

Coloured = list[tuple[Tensor, State]]  # some of the arguments of a call


def uncoupled(coloured: Coloured) -> dict[int, Layout]:
    """The layouts among states of tensors, by their ids, but for those that are coupled."""
    return {id(t): s for t, s in coloured if isinstance(s, Layout) and s.coupled is None}


_INTERNED: dict[tuple[int, int], Layout] = {}


def closed(axis: int, inner: int = 1) -> Layout:
    """The interned closed layout."""
    return _INTERNED.setdefault((axis, inner), Layout(axis, inner))


def explicit(ids: Tensor, n: int) -> Layout:
    """A layout from ids broadcastable to the tensor, in closed form where one fits."""
    axes = [d for d, size in enumerate(ids.shape) if size != 1]
    inner = _closed_form(ids.flatten(), n) if len(axes) == 1 else None
    return Layout(0, 1, ids) if inner is None else closed(axes[0], inner)


def _closed_form(ids: Tensor, n: int, *, bold: bool = False) -> int | None:
    """The ``inner`` for which ids are (j // inner) % n.

    Unowned rows agree with anything, but only for the ``bold``: whoever takes them for some
    sample's has to remember that this is a guess.
    """
    size = ids.numel()
    if n == 0 or size == 0 or size % n:
        return 1 if n == size == 0 else None  # there is nothing to colour
    repeats, index = size // n, torch.arange(size, device=ids.device)
    if not bold:  # the first sample's rows come first, and their number is the only candidate
        inner = int((ids != 0).to(torch.uint8).argmax()) if n > 1 else size
        fits = inner > 0 and repeats % inner == 0
        return inner if fits and torch.equal(index // inner % n, ids) else None
    wild = ids < 0
    for inner in sorted((d for d in range(1, repeats + 1) if repeats % d == 0), reverse=True):
        if bool((((index // inner) % n == ids) | wild).all()):
            return inner
    return None


def disagree(first: Tensor, second: Tensor) -> bool:
    """Whether some element is of one sample here, and of another there."""
    return bool(((first >= 0) & (second >= 0) & (first != second)).any())


def with_hints(ids: Tensor) -> Tensor:
    """Nobody's elements beside those of one sample alone are its, if it comes to that."""
    unowned = ids < 0
    known = ids[~unowned]
    if known.numel() in (0, ids.numel()) or bool((known != known[0]).any()):
        return ids
    return torch.where(unowned, -2 - known[0], ids)


def by_position(ids: Tensor, n: int) -> Layout | None:
    """Ids in closed form, if those that are known agree with one: a guess for the others."""
    axes = [d for d, size in enumerate(ids.shape) if size != 1]
    for axis in axes:
        top = one_colour(ids, [d for d in axes if d != axis])
        inner = None if top is None else _closed_form(top.flatten(), n, bold=True)
        if inner is not None:
            return closed(axis, inner)
    return None


def one_colour(ids: Tensor, axes: list[int]) -> Tensor | None:
    """The colour of everything along some axes, if there is one besides constants."""
    if math.prod(ids.shape[d] for d in axes) == 1:
        return ids
    top = ids.amax(axes, keepdim=True)
    return top if bool(((ids == top) | (ids < 0)).all()) else None


def ids_of(layout: Layout, shape: Shape, n: int, device: torch.device) -> Tensor:
    """Colours as a tensor of the rank of ``shape``, broadcastable to it."""
    if layout.ids is not None:
        return layout.ids
    index = torch.arange(shape[layout.axis], device=device) // layout.inner % max(n, 1)
    return index.view([-1 if d == layout.axis else 1 for d in range(len(shape))])


def remap(layout: Layout, places: Sequence[int | None], rank: int) -> Layout:
    """Move axis d to ``places[d]`` in a tensor of that rank.

    Along a lost axis there may be one colour besides constants: what is computed from both has it.
    """
    if layout.ids is None:
        place = places[layout.axis]
        if place is None:
            raise Mixing("the operator acts across the axis that holds the samples")
        return closed(place, layout.inner)
    ids = layout.ids
    kept = sorted((place, d) for d, place in enumerate(places) if place is not None)
    lost = [d for d, place in enumerate(places) if place is None]
    for d in lost:
        found = one_colour(ids, [d]) if ids.shape[d] else None
        if found is None:
            raise Mixing("the operator acts across an axis that holds samples")
        ids = found
    view = [1] * rank
    for place, d in kept:
        view[place] = ids.shape[d]
    return Layout(0, 1, ids.permute([*lost, *(d for _, d in kept)]).reshape(view))


def place(layout: Layout, shape: Shape, places: Sequence[int | None], out: Shape, n: int) -> Layout:
    """The same in a tensor of shape ``out``, where the samples' axis keeps its size."""
    moved = remap(layout, places, len(out))
    if moved.ids is None and out[moved.axis] != (size := shape[layout.axis]):
        if size != 1 or n != 1:
            raise Mixing(
                f"the axis that holds the samples changes from {size} to {out[moved.axis]}"
            )
    return moved


def align(layout: Layout, shape: Shape, out: Shape, n: int) -> Layout:
    """Right-aligned broadcasting of ``shape`` to ``out``."""
    shift = len(out) - len(shape)
    if layout.ids is not None and shift == 0:
        return layout
    places = [d + shift if d + shift >= 0 else None for d in range(len(shape))]
    return place(layout, shape, places, out, n)


def merge(one: Layout, two: Layout, shape: Shape, n: int) -> Layout:
    """The layout of a result computed element by element from two coloured tensors."""
    if one is two:
        return one
    devices = [layout.ids.device for layout in (one, two) if layout.ids is not None]
    if not devices:
        raise Mixing(
            f"two tensors hold their samples in different places: {one} and {two}", NAME_IT
        )
    first, second = (ids_of(layout, shape, n, devices[0]) for layout in (one, two))
    if first is second or (first.shape == second.shape and torch.equal(first, second)):
        return one
    if disagree(first, second):
        raise Mixing("rows of different samples are combined in one element")
    return explicit(torch.maximum(first, second), n)
