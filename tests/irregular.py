"""Trials of an operator in which ids tell the samples apart: in no order, unequal counts.

The roles are those of :mod:`tests.operators`. Samples are rows of an axis with ids in no order,
without and with rows of nobody; or single elements, so that the colour changes along all axes or
along two. Several arguments hold them alike, or each in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from .operators import Mark, Weight, _call, _fresh, float_places, run

Trial = tuple[str, Callable[[], str]]
MOST = 20  # rows of an axis that is tried


def irregular(size: int, *, holes: bool = False, turn: int = 0) -> tuple[Tensor, int]:
    """Ids of rows in no order, and how many samples there are: 1 0, 1 0 1, 1 0 2 1, …"""
    n = 2 if size < 4 else 3
    ids = torch.tensor([(1, 0, 2 % n, 1, 1, 0, 2 % n)[j % 7] for j in range(size)])
    if size == 3:
        ids[2] = 1
    if holes:
        ids[size // 2] = -1
    return ids.roll(turn), n


def trials(op: Any, sample: Any) -> Iterator[Trial]:
    """Every role of every tensor argument and axis."""
    leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = float_places(leaves)
    base = [v.detach().clone() if isinstance(v, Tensor) else v for v in leaves]

    def runs(leaves: list[Any]) -> Any:
        return _call(op, leaves, spec)

    for k in places:
        for axis in range(base[k].dim()):
            size = base[k].shape[axis]
            if not 1 < size <= MOST:
                continue
            for holes in (False, True)[: 2 if size > 2 else 1]:
                ids, n = irregular(size, holes=holes)
                name = f"ids {ids.tolist()} of {k} axis {axis}"
                yield name, lambda k=k, a=axis, i=ids, n=n: _rows(runs, base, {k: i}, a, n)
            ids, n = irregular(size)
            for j in places:
                if j != k:
                    name = f"use param {j} ids {ids.tolist()} of {k} axis {axis}"
                    yield name, lambda j=j, k=k, a=axis, i=ids, n=n: _use(runs, base, j, k, a, i, n)
        if 1 < base[k].numel() <= 200:
            for pattern in _patterns(base[k].shape):
                name = f"elements {k} {tuple(pattern.shape)}"
                yield name, lambda k=k, p=pattern: _elements(runs, base, k, p)
    yield from _several(runs, base, places)


def _several(runs: Any, base: list[Any], places: list[int]) -> Iterator[Trial]:
    """Arguments that hold samples on the same axis, alike or not."""
    for axis in range(-1, -4, -1):
        group = [k for k in places if base[k].dim() >= -axis and base[k].shape[axis] > 1]
        sizes = {base[k].shape[axis] for k in group}
        if len(group) < 2 or len(sizes) != 1 or max(sizes) > MOST:
            continue
        for turn in (0, 1):
            told = {k: irregular(max(sizes), turn=turn * (k != group[0])) for k in group}
            n = told[group[0]][1]
            ids = {k: found for k, (found, _) in told.items()}
            name = f"ids {[i.tolist() for i in ids.values()]} of {group} axis {axis}"
            yield name, lambda i=ids, a=axis, n=n: _rows(runs, base, i, a, n)


def _patterns(shape: torch.Size) -> list[Tensor]:
    """Ids that change along all axes, and along the first two and the last two alone."""
    count = shape.numel()
    found = [(torch.arange(count) * 5 // 3 % 3).view(shape)]
    if len(shape) > 2:
        for two in ((0, 1), (len(shape) - 2, len(shape) - 1)):
            sizes = [s if d in two else 1 for d, s in enumerate(shape)]
            width = shape[two[0]] * shape[two[1]]
            found.append((torch.arange(width) * 5 // 3 % 3).view(sizes))
    return [ids for ids in found if ids.numel() > 1]


def _rows(runs: Any, base: list[Any], ids: dict[int, Tensor], axis: int, n: int) -> str:
    """A parameter is added to arguments whose rows are told by ids."""
    values = _fresh(base)
    xs = {k: values[k].requires_grad_() for k in ids}
    shape = list(next(iter(xs.values())).shape) if len(xs) == 1 else []
    if shape:
        shape[axis] = 1
    module = Weight(torch.zeros(shape, dtype=torch.float64))

    def call(m: Weight) -> Any:
        leaves = [v.clone() if isinstance(v, Tensor) else v for v in values]
        for k, x in xs.items():
            leaves[k] = x + m.w
        return runs(leaves)

    return run(call, module, [Mark(x, axis % x.dim(), ids[k]) for k, x in xs.items()], n)


def _use(runs: Any, base: list[Any], j: int, k: int, axis: int, ids: Tensor, n: int) -> str:
    """One argument is the parameter, the rows of another are told by ids."""
    values = _fresh(base)
    x = values[k].requires_grad_()
    module = Weight(values[j])

    def call(m: Weight) -> Any:
        leaves = list(values)
        leaves[j] = m.w
        return runs(leaves)

    return run(call, module, [Mark(x, axis, ids)], n)


def _elements(runs: Any, base: list[Any], k: int, pattern: Tensor) -> str:
    """Single elements of an argument are told by ids."""
    values = _fresh(base)
    shape = values[k].shape
    flat = values[k].reshape(-1).clone().requires_grad_()
    ids = pattern.expand(shape).reshape(-1)
    n = int(ids.max()) + 1
    module = Weight(torch.zeros((), dtype=torch.float64))

    def call(m: Weight) -> Any:
        leaves = list(values)
        leaves[k] = flat.view(shape) + m.w
        return runs(leaves)

    return run(call, module, [Mark(flat, 0, ids)], n)
