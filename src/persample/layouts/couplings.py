"""Layouts that are coupled to the whole batch, and followed all the same: it may be undone.

Rows sorted over all samples, and grouped again: each sample's rows in the sample's own order. A
sort over all rows leaves the rows of a sample in their own order, with rows of others in between:
where a row is depends on the whole batch, and the layout is coupled by an :class:`Arrangement`. A
stable sort by keys that no two samples share brings the rows of a sample together again; its
indices are coupled by the :class:`Regrouping`. What is read from the arrangement at these indices
depends on one sample alone, and is not coupled any more.

Sums over samples beside samples' own elements, in one tensor. The adjoint of a differential
equation flattens the state, its gradient and the gradients of all parameters to one vector, and
takes it apart again. Elements that are sums have the colour n, which is no sample's, and the layout
is coupled by :class:`Sums`: it is followed through linear operators alone. What picks elements of
one kind is of that kind again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import Reason, here
from .call import Call, Result
from .layout import Additive, Coloured, Layout, explicit, ids_of
from .reshaping import place_in_groups, squeeze_colours

WHY = "the place of a sample's values depends on how they compare with other samples'"
SORTS = frozenset(("sort", "argsort"))
READS = frozenset(("getitem", "index", "index_select", "gather", "take_along_dim"))
SAME = frozenset("to long type contiguous clone detach alias view reshape flatten".split())
JOINS = frozenset(("cat", "concat", "concatenate", "setitem"))


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement(Reason):
    """Along an axis, each sample's rows are in its own order, among the rows of others."""

    axis: int = 0
    lines: bool = True  # whole rows were moved, not the elements of each column for themselves
    orders: tuple[Tensor, Tensor] | None = None  # found, and of a stable sort, if they differ


@dataclass(frozen=True, slots=True, eq=False)
class Regrouping(Reason):
    """Values are places in an arrangement, of rows that belong to the same samples."""

    of: Arrangement | None = None


def rank(call: Call, x: Tensor, axis: int, ids: Tensor, indices: Tensor) -> Reason:
    """Why values that were sorted over samples, and their indices, are coupled."""
    about = (call.name, WHY, (tuple(x.shape),), here())
    if bool((ids < 0).any()):
        return Reason(*about)
    stable = indices
    if not call.kwargs.get("stable"):
        descending = bool(call.arg(2, "descending", default=False))
        stable = x.detach().sort(dim=axis, descending=descending, stable=True).indices
    same = stable is indices or torch.equal(stable, indices)
    orders = None if same else (indices.clone(), stable)
    return Arrangement(*about, axis=axis, lines=x.dim() == 1, orders=orders)


def regroup(call: Call, keys: Tensor, layout: Layout) -> Result | list[Result]:
    """Arranged rows in a stable sort by integer keys that no two samples share; else None."""
    why, indices = layout.coupled, call.out if call.name == "argsort" else call.out[1]
    if not isinstance(why, Arrangement) or keys.is_floating_point():
        return None
    axis = call.arg(1, "dim", default=-1) % keys.dim()
    ids = ids_of(layout, keys.shape, call.n, keys.device).expand(keys.shape).gather(axis, indices)
    shared = (keys.gather(axis, indices).diff(dim=axis) == 0) & (ids.diff(dim=axis) != 0)
    if (
        axis != why.axis
        or not call.kwargs.get("stable")
        or bool((ids < 0).any() | shared.any())
        or (why.orders is not None and why.orders[0].shape != keys.shape)
    ):
        return None
    if why.orders is not None:
        down = bool(call.kwargs.get("descending"))
        _order_ties(keys, axis, indices, *why.orders, descending=down)
    found = explicit(squeeze_colours(ids, call.n), call.n)
    again = found.with_coupling(Regrouping(why.operator, why.why, why.shapes, why.place, of=why))
    return again if call.name == "argsort" else [found, again]


def _order_ties(
    keys: Tensor, axis: int, indices: Tensor, order: Tensor, stable: Tensor, *, descending: bool
) -> None:
    """Let a sample's equal values come in their own order, as in a stable sort of all values.

    An unstable sort leaves the order of equal values open, and other samples decide it.
    """
    places = order.argsort(dim=axis)  # of each row in the arrangement
    by_row = keys.gather(axis, places).gather(axis, stable)
    again = by_row.sort(dim=axis, descending=descending, stable=True).indices
    indices.copy_(places.gather(axis, stable.gather(axis, again)))


def coupling_after(call: Call, coupled: list[tuple[Tensor, Layout]]) -> Reason | None:
    """What couples the result of a linear operator on coupled layouts, if anything does."""
    (tensor, layout), *others = coupled
    if call.name in READS:
        return _coupling_of_read(call, coupled)
    same = call.name in SAME and not others and call.out.shape == tensor.shape
    kept = same and call.out.dtype in (tensor.dtype, torch.long)
    return layout.coupled if kept else _loose(layout.coupled)


def _coupling_of_read(call: Call, coupled: list[tuple[Tensor, Layout]]) -> Reason | None:
    source, index, axis = _parts(call)
    whys = {id(tensor): layout.coupled for tensor, layout in coupled}
    of, at = whys.pop(id(source), None), whys.pop(id(index), None)
    first = of or at or next(iter(whys.values()))
    if whys or axis is None or (at is not None and index.dtype is not torch.long):
        return _loose(first)
    whole = call.out.shape == index.shape
    if of is None and isinstance(at, Arrangement) and at.axis == axis and (at.lines or whole):
        return at
    if at is None and isinstance(of, Regrouping) and of.of is not None and of.of.lines:
        return of
    if isinstance(at, Regrouping) and isinstance(of, Arrangement) and at.of is of:
        if of.axis == axis and (of.lines or (whole and index.shape == source.shape)):
            return None
    return _loose(first)


def _parts(call: Call) -> tuple[Tensor, Any, int | None]:
    """The source of a read, its index, and along which axis one tensor is the whole index."""
    source = call.arg(0, "input", "self")
    if call.name in ("getitem", "index"):
        index = call.arg(1)
        while isinstance(index, (tuple, list)) and len(index) == 1:
            index = index[0]
        return source, index, 0 if isinstance(index, Tensor) else None
    index, dim = call.arg(2, "index"), call.arg(1, "dim")
    if call.name == "take_along_dim":
        index, dim = call.arg(1, "indices"), call.arg(2, "dim")
    return source, index, None if dim is None else dim % max(source.dim(), 1)


def _loose(why: Reason | None) -> Reason | None:
    """The same reason, where it is no longer known how the places depend on the batch."""
    if not isinstance(why, (Arrangement, Regrouping)):
        return why
    return Reason(why.operator, why.why, why.shapes, why.place, why.fix, why.real)


def counts_rows(values: Tensor, layout: Layout, n: int) -> bool:
    """Whether integers number the rows of each sample from zero on, as the sample alone would."""
    if values.dim() != 1 or values.is_floating_point() or not values.numel():
        return False
    ids = ids_of(layout, values.shape, n, values.device).expand(values.shape)
    owned = not bool((ids < 0).any())
    return owned and torch.equal(values, place_in_groups(ids, n)[0].to(values.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Sums(Reason):
    """Some elements are sums over samples."""


def beside_samples(live: Coloured, why: Reason, n: int) -> Coloured | None:
    """The arguments of a join, sums as layouts; None where values depend on the whole batch."""
    sums = Sums(why.operator, why.why, why.shapes, why.place, why.fix, why.real)
    own = {
        id(t): s for t, s in live if isinstance(s, Layout) and isinstance(s.coupled, Sums | None)
    }
    if any(id(t) not in own and state != Additive() for t, state in live):
        return None
    blank = [(t, torch.full((1,) * t.dim(), n, device=t.device)) for t, _ in live]
    return [(t, own.get(id(t)) or Layout(0, 1, ids, sums)) for t, ids in blank]


def taken_apart(state: Result, why: Sums, n: int) -> Result:
    """Sums alone are a sum, samples alone are samples; both together keep the reason."""
    if not isinstance(state, Layout):
        return state
    sums = None if state.ids is None else state.ids == n
    if sums is None or not bool(sums.any()):
        return state if state.ids is None else explicit(state.ids, n)
    return Additive() if bool(sums.all()) else state.with_coupling(why)
