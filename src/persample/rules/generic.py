"""The rule that serves every operator: vector-Jacobian products, one sample's rows at a time.

If row r of the output belongs to sample i, then only loss i can depend on it, so

    gᵢ = vjp(operator, output gradient masked to the rows of sample i)

whatever the operator is. All samples at once where torch can batch the backward formula.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..errors import MissedUseError, describe
from ..forms import Dense
from ..layout import Layout, ids_of
from ..use import Firing, Use

_CHUNK_BYTES = 64 << 20


def generic(use: Use, firing: Firing, n: int) -> list[Dense | None]:
    """One form per parameter operand (None: the operator does not depend on it)."""
    values = [operand.value.detach().requires_grad_() for operand in use.operands]
    saved = [t.detach() for t in firing.saved]
    with torch.enable_grad():
        outs = use.replay(saved, values)
    pairs = [
        (out, grad, layout)
        for out, grad, layout in zip(outs, firing.grads, use.out_layouts, strict=True)
        if grad is not None and out.requires_grad
    ]
    if not pairs:
        return [None] * len(values)
    results = [out for out, _, _ in pairs]
    grads = [(grad.detach().to(out.dtype), layout) for out, grad, layout in pairs]
    for grad, layout in grads:
        check_unowned(use, grad, layout)
    if n == 0:
        return [Dense(v.new_zeros((0, *v.shape))) for v in values]
    rows = _batched(results, values, grads, n)
    if rows is None:
        rows = _one_by_one(results, values, grads, n)
    return [None if r is None else Dense(r) for r in rows]


def check_unowned(use: Use, grad: Tensor, layout: Layout) -> None:
    """Rows of no sample must have received no gradient."""
    if layout.ids is None or not bool((layout.ids < 0).any()):
        return
    if bool((grad * (layout.ids < 0)).ne(0).any()):
        raise MissedUseError(
            f"a parameter used by {use.operator} reached the loss through rows of no sample",
            where=describe(use.place),
            why="constant rows were joined to the samples' axis and then used",
            fix="join constants along another axis than the samples'",
        )


def _mask(layout: Layout, grad: Tensor, n: int, first: int, last: int) -> Tensor:
    """(last - first, *grad.shape) broadcastable: one where the row belongs to the sample."""
    ids = ids_of(layout, grad.shape, n, grad.device)
    samples = torch.arange(first, last, device=grad.device)
    return ids.unsqueeze(0) == samples.view(-1, *[1] * ids.dim())


def _masked(grads: list[tuple[Tensor, Layout]], n: int, first: int, last: int) -> list[Tensor]:
    # where, not multiplication: another sample's inf must not become this one's nan
    return [
        torch.where(
            _mask(layout, g, n, first, last), g, torch.zeros((), dtype=g.dtype, device=g.device)
        )
        for g, layout in grads
    ]


def _batched(
    outs: list[Tensor], values: list[Tensor], grads: list[tuple[Tensor, Layout]], n: int
) -> list[Tensor | None] | None:
    """All samples in a few batched backward passes; None where torch cannot batch."""
    size = sum(g.numel() * g.element_size() for g, _ in grads) + sum(
        v.numel() * v.element_size() for v in values
    )
    step = max(1, min(n, _CHUNK_BYTES // max(size, 1)))
    parts: list[tuple[Tensor | None, ...]] = []
    try:
        for first in range(0, n, step):
            seeds = _masked(grads, n, first, min(first + step, n))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parts.append(
                    torch.autograd.grad(
                        outs,
                        values,
                        seeds,
                        retain_graph=True,
                        allow_unused=True,
                        is_grads_batched=True,
                    )
                )
    except RuntimeError:
        return None
    return _join(parts)


def _join(parts: list[tuple[Tensor | None, ...]]) -> list[Tensor | None]:
    columns = zip(*parts, strict=True)
    return [
        None if any(p is None for p in column) else torch.cat([p for p in column if p is not None])
        for column in columns
    ]


def _one_by_one(
    outs: list[Tensor], values: list[Tensor], grads: list[tuple[Tensor, Layout]], n: int
) -> list[Tensor | None]:
    rows: list[tuple[Tensor | None, ...]] = []
    for i in range(n):
        seeds = [g[0] for g in _masked(grads, n, i, i + 1)]
        found = torch.autograd.grad(outs, values, seeds, retain_graph=True, allow_unused=True)
        rows.append(tuple(None if f is None else f.to_dense().unsqueeze(0) for f in found))
    return _join(rows)
