"""One sample's data in place of the others': zero times their NaN would spoil its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..forms import wide
from ..layouts.layout import Layout, ids_of


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
    if layout.ids is not None:
        mine = (ids_of(layout, tensor.shape, n, tensor.device) == i).expand(tensor.shape)
        own = tensor[mine]
        return torch.where(mine, tensor, own[0] if own.numel() else 0)
    axis, inner = layout.axis, layout.inner
    index = torch.arange(tensor.shape[axis], device=tensor.device)
    index = index // (n * inner) * (n * inner) + i * inner + index % inner
    return tensor.index_select(axis, index)
