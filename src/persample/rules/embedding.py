"""Rows of a table that data choose: embeddings, ``bias[items]``, ``transitions[a, b]``."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..forms import Dense, Form, Part, Rows
from ..layouts import Layout, closed
from ..uses import Firing, Lookup, Operand, Use, version
from .table import Forms, OfTable, Unsuited, only_operand, only_output, row_ids, rule


@rule("embedding")
def embedding(use: Use, firing: Firing, n: int) -> Forms:
    """padding_idx rows get nothing; scale_grad_by_freq counts within one sample."""
    weight, index, padding, by_frequency = use.bind(
        firing, "weight", "indices", "padding_idx", "scale_grad_by_freq"
    )
    grad, layout = only_output(use, firing)
    found = table_rows(layout, index, grad, n, weight.shape, padding)
    if by_frequency:
        _, where, counts = torch.unique(found.keys(), return_inverse=True, return_counts=True)
        found.values = found.values / counts[where].unsqueeze(1)
    return [found]


def looked_up(grad: Tensor, layout: Layout, operand: Operand, n: int) -> OfTable:
    """Rows of a table, chosen by constants, used with each sample in places of its own."""
    lookup = operand.lookup
    if lookup is None or version(lookup.index) != lookup.version:
        raise Unsuited  # autograd says what was overwritten
    return OfTable(table_rows(layout, lookup.index, grad, n, lookup.shape, lookup.padding))


def of_table(form: Dense, lookup: Lookup) -> Form:
    """The gradient of ``table[index]``, the same index for every sample, as one of the table."""
    n, index, width = form.n, lookup.index.reshape(-1), form.shape[-1]
    values = form.values.reshape(n, index.numel(), width)
    padded = lookup.padding is not None and lookup.padding >= 0
    if not padded and index.numel() and bool((index.diff() == 1).all()):  # positions: a slice
        return Part(Dense(values), lookup.shape, (width, 1), int(index[0]) * width)
    return table_rows(closed(0), index.repeat(n), values, n, lookup.shape, lookup.padding)


def table_rows(
    layout: Layout, index: Tensor, grad: Tensor, n: int, shape: torch.Size,
    padding: int | None = None,
) -> Rows:  # fmt: skip
    """Rows of no sample, and of the padding index, count nothing."""
    index, values = index.reshape(-1), grad.flatten(0, -2) if grad.dim() > 1 else grad[None]
    keep, sample = _kept(index, padding), None
    even = layout.ids is None and layout.axis == 0 and grad.dim() > 1
    if not even or grad.shape[0] != n * layout.inner:
        sample = row_ids(grad, layout, n, grad.dim() - 1)
    if sample is not None and layout.ids is not None:  # there may be unowned rows
        keep = sample >= 0 if keep is None else keep & (sample >= 0)
        sample = sample.clamp(min=0)
    if keep is not None:
        values = values.masked_fill(~keep.unsqueeze(1), 0)
    return Rows(sample, index.to(torch.long), values, n, shape)


def _kept(index: Tensor, padding: int | None) -> Tensor | None:
    """Where an index is not the one for padding, if there is such."""
    return None if padding is None or padding < 0 else index != padding


@rule("embedding_bag _embedding_bag _embedding_bag_forward_only")
def embedding_bag(use: Use, firing: Firing, n: int) -> Forms:
    """Sums and means of rows; maxima go to the generic rule."""
    weight, index, offsets, by_frequency, mode, _, scales, _, padding = use.bind(
        firing, "weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse",
        "per_sample_weights", "include_last_offset", "padding_idx",
    )  # fmt: skip
    grad, layout = only_output(use, firing)
    only_operand(use, weight)
    if mode not in (0, 1) or use.tapped.results[0] != 0:
        raise Unsuited
    if by_frequency:
        if dict(zip(use.kind.data, use.kind.layouts, strict=True)).get(1) is None:
            raise Unsuited  # the same indices for all samples: there is nothing to count alone
        rows = row_ids(grad, layout, n, 1)
        return [Dense(_alone(weight, index, offsets, mode, scales, padding, grad, rows, n))]
    starts = offsets[: grad.shape[0]].to(torch.long)
    rows = torch.arange(index.shape[0], device=index.device)
    bag = torch.searchsorted(starts, rows, right=True) - 1
    values, kept = grad[bag], _kept(index, padding)
    if scales is not None:
        values = values * scales.unsqueeze(1)
    if mode == 1:
        sizes = torch.bincount(bag if kept is None else bag[kept], minlength=grad.shape[0])
        values = values / sizes.clamp(min=1)[bag].unsqueeze(1)
    where = Layout(0, 1, row_ids(grad, layout, n, 1)[bag].unsqueeze(1))
    return [table_rows(where, index, values, n, weight.shape, padding)]


def _alone(
    weight: Tensor, index: Tensor, offsets: Tensor, mode: int, scales: Tensor | None,
    padding: int | None, grad: Tensor, sample: Tensor, n: int,
) -> Tensor:  # fmt: skip
    """Each sample's bags by torch's own kernel: it alone knows what it takes for frequencies."""
    ends = torch.cat([offsets[1 : grad.shape[0]], offsets.new_full((1,), index.shape[0])])
    table = weight.detach().requires_grad_()
    found = []
    for i in range(n):
        mine = (sample == i).nonzero().flatten()
        runs = [torch.arange(int(offsets[b]), int(ends[b]), device=index.device) for b in mine]
        starts = torch.tensor([0, *(r.numel() for r in runs)], device=index.device).cumsum(0)[:-1]
        rows = torch.cat(runs) if runs else index.new_zeros(0)
        with torch.enable_grad():
            out = F.embedding_bag(
                index[rows], table, starts, mode=("sum", "mean")[mode], scale_grad_by_freq=True,
                per_sample_weights=None if scales is None else scales[rows],
                padding_idx=None if padding is None or padding < 0 else padding,
            )  # fmt: skip
            found.append(torch.autograd.grad(out, table, grad[mine])[0])
    return torch.stack(found)


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
    operand = only_operand(use)
    table = operand.value
    numbers = all(isinstance(i, Tensor) and i.dtype in (torch.int64, torch.int32) for i in index)
    own = operand.position == 0 and not operand.expanded
    if not own or not numbers or not 0 < len(index) <= table.dim():
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
    where = torch.zeros((), dtype=torch.int64, device=index[0].device)
    for i, size in zip(index, shape, strict=False):
        where = where * size + torch.where(i < 0, i + size, i)
    return where, math.prod(shape[: len(index)])
