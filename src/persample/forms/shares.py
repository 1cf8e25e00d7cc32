"""Shares of squared norms: a gradient split into T pieces, gᵢ = Σₜ gᵢₜ, and ⟨gᵢₜ, gᵢ⟩ of each.

The pieces are a form of n · T gradients, row i · T + t. Cross terms are in it: shares of one sample
add up to ‖gᵢ‖² whatever the pieces cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dense import Dense
from .form import BUDGET, Form, real, spans, wide
from .outer import Outer
from .part import Part
from .rows import Rows
from .total import Total, added


def shares(form: Form, n: int, *, budget: int = BUDGET) -> Tensor:
    """⟨gᵢₜ, gᵢ⟩: (n, T)."""
    if form.n == 0:
        return torch.zeros(n, form.n // max(n, 1), dtype=real(form.dtype), device=form.device)
    if isinstance(form, Part):  # a view that names no element twice
        return shares(form.form, n, budget=budget)
    if not form.dtype.is_complex:
        if isinstance(form, Dense):
            return _dense(form, n, budget)
        if isinstance(form, Outer):
            return _outer(form, n, budget)
        if isinstance(form, Rows):
            return _rows(form, n)
        if isinstance(form, Total):
            pair = form.tied()
            if pair is not None:
                return _tied(*pair, n, budget)
            if form.disjoint():
                return added([shares(f, n, budget=budget) for f in form.forms])
    return _written(form, n)


def _dense(form: Dense, n: int, budget: int) -> Tensor:
    pieces = form.values.reshape(n, form.n // n, -1)
    out = pieces.new_zeros(pieces.shape[:2], dtype=real(form.dtype))
    for first, last in spans(n, 2 * pieces[0].numel() * wide(form.dtype).itemsize, budget):
        part = pieces[first:last].to(out.dtype)
        out[first:last] = torch.matmul(part, part.sum(1).unsqueeze(2)).squeeze(2)
    return out


def _by_sample(form: Outer, n: int) -> tuple[Tensor, Tensor]:
    """Factors (n, k, T · u, a) and (n, k, T · u, b): pieces of a sample are its positions."""
    left, right = (
        f.view(n, -1, *f.shape[1:]).transpose(1, 2).flatten(2, 3) for f in (form.left, form.right)
    )
    return left, right


def _outer(form: Outer, n: int, budget: int) -> Tensor:
    """By products of positions, or by the sample's matrix, whichever is cheaper."""
    dtype = wide(form.dtype)
    left, right = _by_sample(form, n)
    k, t, a, b = *left.shape[1:], right.shape[3]
    gram = 2 * t * (a + b) < 3 * a * b
    item = k * (2 * t * t if gram else a * b + t * b) * dtype.itemsize
    out = torch.zeros(n, form.n // n, dtype=real(form.dtype), device=form.device)
    for first, last in spans(n, item, budget):
        mine, other = left[first:last].to(dtype), right[first:last].to(dtype)
        if gram:
            products = torch.matmul(mine, mine.mT)
            each = products.mul_(torch.matmul(other, other.mT)).sum((1, 3))
        else:
            matrix = torch.matmul(mine.mT, other)
            each = torch.matmul(mine, matrix).mul_(other).sum((1, 3))
        out[first:last] = each.view(last - first, form.n // n, -1).sum(2)
    return out


def _rows(form: Rows, n: int) -> Tensor:
    """Each row with the sum of its sample's rows of the same index."""
    pieces = form.n // n
    values = form.values.to(wide(form.dtype))
    keys = torch.div(form.sample, pieces, rounding_mode="floor") * form.shape[0] + form.index
    found, where = torch.unique(keys, return_inverse=True)
    sums = values.new_zeros(found.numel(), values.shape[1]).index_add_(0, where, values)
    each = (values * sums[where]).sum(1)
    return each.new_zeros(form.n).index_add_(0, form.sample, each).view(n, pieces)


def _tied(rows: Rows, outer: Outer, n: int, budget: int) -> Tensor:
    """Both alone, and their cross term, which is a share of both sides."""
    out = shares(rows, n, budget=budget) + shares(outer, n, budget=budget)
    flat, pieces, dtype = out.view(-1), rows.n // n, out.dtype
    left, right = _by_sample(outer, n)
    per = left.shape[2] // pieces
    order = torch.argsort(rows.sample, stable=True)
    owner = torch.div(rows.sample[order], pieces, rounding_mode="floor")
    at = 0
    for i, count in enumerate(torch.bincount(owner, minlength=n).tolist()):
        part = order[at : at + count]
        at += count
        if count:
            products = left[i, 0].to(dtype)[:, rows.index[part]]
            products *= right[i, 0].to(dtype) @ rows.values[part].to(dtype).T
            out[i] += products.sum(1).view(pieces, per).sum(1)
            flat.index_add_(0, rows.sample[part], products.sum(0))
    return out


def _written(form: Form, n: int) -> Tensor:
    """Any mixture: the sample's own gradient, written out, is the direction of its pieces."""
    pieces = form.n // n
    out = torch.zeros(n, pieces, dtype=real(form.dtype), device=form.device)
    ones = torch.ones(pieces, dtype=out.dtype, device=form.device)
    for i in range(n):
        mine = form.narrowed(i * pieces, (i + 1) * pieces)
        out[i] = mine.dot(mine.weighted_sum(ones))
    return out
