"""Elements and rows of a parameter that data choose: ``bias[items]``, ``transitions[a, b]``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..forms import Form, Part
from ..uses.use import Firing, Use
from .by_sample import Unsuited, only_output
from .embedding import table_rows
from .table import Forms, rule


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
