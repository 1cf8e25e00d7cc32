"""The rule that serves every operator: vector-Jacobian products, one sample's rows at a time.

If row r of the output belongs to sample i, then only loss i can depend on it, so

    gᵢ = vjp(operator, output gradient masked to the rows of sample i)

whatever the operator is. All samples at once where torch can batch the backward formula; of a
sample that others' NaN would spoil, with its own data in place of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..forms import Replay, lift, lower, spans, walk_rows, wide
from ..layouts import Layout, ids_of
from ..uses import Firing, Use
from .table import Forms


def rows_not_finite(rows: Tensor) -> list[int]:
    """The rows that are not finite."""
    sums = rows.flatten(1).sum(1, dtype=wide(rows.dtype)) if rows.dim() > 1 else rows
    found: list[int] = (~sums.isfinite()).nonzero()[:, 0].tolist()  # quicker than every element
    return [at for at in found if not bool(rows[at].isfinite().all())]


def only(data: Sequence[Tensor], layouts: Sequence[Layout | None], i: int, n: int) -> list[Tensor]:
    """The data, with numbers of other samples replaced by those of sample i.

    Where samples are separate, nothing of sample i's result changes. Indices and masks stay: they
    say where things go.
    """
    return [
        tensor
        if layout is None or not (tensor.is_floating_point() or tensor.is_complex())
        else _copy_sample(tensor, layout, i, n)
        for tensor, layout in zip(data, layouts, strict=True)
    ]


def _copy_sample(tensor: Tensor, layout: Layout, i: int, n: int) -> Tensor:
    mine = (ids_of(layout, tensor.shape, n, tensor.device) == i).expand(tensor.shape)
    own = tensor[mine]
    return torch.where(mine, tensor, own[0] if own.numel() else 0)


def generic(use: Use, firing: Firing, n: int) -> Forms:
    """One form per parameter operand (None: the operator does not depend on it)."""
    again = _Again(use, firing, n)
    held = [*again.saved, *(g for g in firing.grads if g is not None)]
    return [
        Replay(partial(again.rows, k), partial(again.sum, k), n, value, held)
        for k, value in enumerate(again.values)
    ]


class _Again:
    """A use that is run once more, from what was saved of it."""

    __slots__ = ("_given", "_n", "_up", "_use", "saved", "values")

    def __init__(self, use: Use, firing: Firing, n: int) -> None:
        self._use, self._n = use, n
        self.values = [operand.value.detach().requires_grad_() for operand in use.operands]
        self.saved = [t.detach() for t in firing.saved]
        given = [None if g is None else g.detach() for g in firing.grads]
        self._up = up = lift([g for g in given if g is not None], use.narrow())
        self._given = given if up is None else [None if g is None else g * up for g in given]

    def rows(self, k: int, first: int, last: int) -> Tensor:
        """gᵢ of an operand for some samples."""
        value, n = self.values[k], self._n
        outs, grads = self._replay(self.saved)
        found = _rows(outs, value, grads, n, first, last) if outs else None
        if found is None:
            return value.detach().new_zeros((last - first, *value.shape))
        for at in rows_not_finite(found) if n > 1 else ():
            row = self._alone(k, outs, first + at)
            if row is not None:
                found[at] = row
        return lower(found, self._up)

    def sum(self, k: int, c: Tensor) -> Tensor:
        """Σ cᵢ gᵢ of an operand."""
        outs, grads = self._replay(self.saved)
        seeds = [g * _coefficients(c, g, layout, self._n) for g, layout in grads]
        value, found = self.values[k], None
        if outs:
            found = torch.autograd.grad(outs, value, seeds, allow_unused=True)[0]
        return torch.zeros_like(value) if found is None else lower(found.to_dense(), self._up)

    def _replay(self, data: list[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, Layout]]]:
        """The results once more, and their gradients with where the samples are."""
        with torch.enable_grad():
            outs = self._use.replay(data, self.values)
        pairs = [
            (out, grad.to(out.dtype), layout)
            for out, grad, layout in zip(outs, self._given, self._use.out_layouts, strict=True)
            if grad is not None and out.requires_grad
        ]
        return [out for out, _, _ in pairs], [(grad, layout) for _, grad, layout in pairs]

    def _alone(self, k: int, outs: list[Tensor], i: int) -> Tensor | None:
        """A sample's row where the others' data are not theirs, if only theirs had spoiled it."""
        data = only(self.saved, self._use.kind.layouts, i, self._n)
        try:
            again, grads = self._replay(data)
        except (RuntimeError, IndexError):  # what it does depends on all data
            return None
        if not _same(outs, again, [layout for _, layout in grads], i, self._n):
            return None
        found = _rows(again, self.values[k], grads, self._n, i, i + 1)
        return None if found is None else found[0]


def _same(one: list[Tensor], two: list[Tensor], layouts: list[Layout], i: int, n: int) -> bool:
    """Whether a sample's elements of the results are the same."""
    if [a.shape for a in one] != [b.shape for b in two]:
        return False
    for a, b, layout in zip(one, two, layouts, strict=True):
        mine = (ids_of(layout, a.shape, n, a.device) == i).expand(a.shape)
        if not torch.allclose(a.detach()[mine], b.detach()[mine], equal_nan=True):
            return False
    return True


def _coefficients(c: Tensor, grad: Tensor, layout: Layout, n: int) -> Tensor:
    ids = ids_of(layout, grad.shape, n, grad.device)
    return torch.where(ids >= 0, c.to(grad.dtype)[ids.clamp(min=0)], 0)


def _rows(
    outs: list[Tensor],
    value: Tensor,
    grads: list[tuple[Tensor, Layout]],
    n: int,
    first: int,
    last: int,
) -> Tensor | None:
    """Gradients of samples first … last-1, batched where torch can."""
    parts: list[Tensor | None] = []
    size = sum(g.numel() * g.element_size() for g, _ in grads) + value.numel() * 8
    edges = [get_gradient_edge(out) for out in outs]
    for start, stop in spans(last - first, size):
        seeds = [_seeds(g, layout, n, first + start, first + stop) for g, layout in grads]
        parts += walk_rows(edges, [value], seeds)
    kept = [p for p in parts if p is not None]
    return torch.cat(kept) if len(kept) == len(parts) else None


def _seeds(grad: Tensor, layout: Layout, n: int, first: int, last: int) -> Tensor:
    """(last - first, *grad.shape): the gradient of each sample's rows, the others' set to zero."""
    ids = ids_of(layout, grad.shape, n, grad.device)
    mine = ids == torch.arange(first, last, device=grad.device).view(-1, *[1] * ids.dim())
    # where, not multiplication: another sample's inf must not become this one's nan
    return torch.where(mine, grad, torch.zeros((), dtype=grad.dtype, device=grad.device))
