"""Indices that data choose: ``bias[items]``, ``transitions[a, b]``, and ``x[mask] = token``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..forms import Form, Part
from ..layouts import squeeze_colours
from ..layouts.layout import Layout, explicit, ids_of
from ..uses.use import Firing, Use
from .broadcast import unbroadcast
from .embedding import table_rows
from .table import Forms, Unsuited, only_output, rule


@rule("getitem index")
def getitem(use: Use, firing: Firing, n: int) -> Forms:
    """Integer tensors choose among the first axes; everything behind them is one row."""
    args, _ = use.arguments(firing)
    index = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    return [_chosen_rows(use, firing, list(index), n)]


@rule("index_select")
def index_select(use: Use, firing: Firing, n: int) -> Forms:
    """The same along the first axis."""
    table, dim, index = use.bind(firing, "input", "dim", "index")
    if not isinstance(index, Tensor) or dim not in (0, -table.dim()):
        raise Unsuited
    return [_chosen_rows(use, firing, [index.reshape(-1)], n)]


def _chosen_rows(use: Use, firing: Firing, index: list[Any], n: int) -> Form:
    grad, layout = only_output(use, firing)
    table = use.operands[0].value
    if len(use.operands) != 1 or use.operands[0].position != 0:
        raise Unsuited
    if use.operands[0].expanded or not 0 < len(index) <= table.dim():
        raise Unsuited
    if not all(isinstance(i, Tensor) and i.dtype in (torch.int64, torch.int32) for i in index):
        raise Unsuited
    where, count = _places(index, table.shape)
    rest = table.shape[len(index) :]
    lead = grad.dim() - len(rest)
    if grad.shape != (*where.shape, *rest) or any(d >= lead for d in layout.axes):
        raise Unsuited
    shape = torch.Size((count, rest.numel()))
    rows = table_rows(layout, where, grad.reshape(*where.shape, shape[1]), n, shape)
    return rows if shape == table.shape else Part(rows, table.shape, (shape[1], 1), 0)


def _places(index: list[Tensor], shape: torch.Size) -> tuple[Tensor, int]:
    """The number of every chosen row when the indexed axes are one, and how many there are."""
    where: Tensor | None = None
    for i, size in zip(index, shape, strict=False):
        i = torch.where(i < 0, i + size, i).to(torch.int64)
        where = i if where is None else where * size + i
    assert where is not None
    return where, math.prod(shape[: len(index)])


@rule("setitem index_put")
def write(use: Use, firing: Firing, n: int) -> Forms:
    """What was written gets the gradient of where it is."""
    _, index, value = use.bind(firing, "input", "indices", "values")
    grad, layout = only_output(use, firing)
    if len(use.operands) != 1 or use.operands[0].value is not value:
        raise Unsuited
    if use.operator == "index_put":
        index = tuple(slice(None) if i is None else i for i in index)
    part = grad[index]
    return [unbroadcast(part, _layout_of_part(layout, grad, index, n), use.operands[0], n)]


def _layout_of_part(layout: Layout, grad: Tensor, index: Any, n: int) -> Layout:
    """The layout of ``grad[index]``."""
    ids = ids_of(layout, grad.shape, n, grad.device).expand(grad.shape)[index]
    return explicit(squeeze_colours(ids, n), n)


@rule("masked_fill")
def masked_fill(use: Use, firing: Firing, n: int) -> Forms:
    """The value gets the gradient where the mask is true, what is filled gets the other."""
    x, mask = use.bind(firing, "input", "mask")
    grad, layout = only_output(use, firing)
    if not isinstance(mask, Tensor):
        raise Unsuited
    found: Forms = []
    for operand in use.operands:
        part = grad.masked_fill(mask if operand.value is x else ~mask, 0)
        found.append(unbroadcast(part, layout, operand, n))
    return found
