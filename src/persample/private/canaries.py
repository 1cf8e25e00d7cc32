"""Data with canaries after them: those that are out keep their place and contribute zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset

from ..errors import UsageError
from ..validation import shown

Blank = Callable[[Any], Any]


class Samples(Dataset[Any]):
    """A tensor, a tuple or dictionary of tensors, or a Dataset, one sample at a time."""

    def __init__(self, data: Any, what: str) -> None:
        columns = list(data.values()) if isinstance(data, Mapping) else [data]
        columns = list(data) if isinstance(data, tuple) else columns
        self._data = data
        self._columns = bool(columns) and all(isinstance(c, Tensor) and c.dim() for c in columns)
        counts = {len(c) for c in columns} if self._columns else set()
        if len(counts) > 1 or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise UsageError(
                f"{what} must be a Dataset, a tensor, or a tuple or dictionary of tensors of one "
                f"number of rows, got {shown(data)}",
                fix=f"torch.utils.data.TensorDataset(...), or a list of samples, as {what}",
            )
        self._count = counts.pop() if counts else len(data)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if self._columns:
            return tree_map(lambda column: column[index], self._data)
        return self._data[index]


class Mixture(Dataset[Any]):
    """Ordinary samples, then canaries.

    Args:
        data: The ordinary samples.
        canaries: Samples of the same kind.
        included: (m,) which canaries are in.
        blank: Makes a canary a sample that contributes zero.
    """

    def __init__(
        self, data: Samples, canaries: Samples, *, included: Tensor, blank: Blank | None
    ) -> None:
        self._data, self._canaries, self._included = data, canaries, included
        self._blank = not_a_number if blank is None else blank

    def __len__(self) -> int:
        return len(self._data) + len(self._canaries)

    def __getitem__(self, index: int) -> Any:
        number = index - len(self._data)
        if number < 0:
            return self._data[index]
        canary = self._canaries[number]
        return canary if self._included[number] else self._blank(canary)


def not_a_number(sample: Any) -> Any:
    """The sample with NaN for every floating-point number: it contributes zero to clipped sums."""
    if not any(_is_floating(leaf) for leaf in tree_leaves(sample)):
        raise UsageError(
            f"a sample without floating-point numbers cannot be blanked: {shown(sample)}",
            why="a canary that is out must contribute zero",
            fix="audit(..., blank=function): e.g. all labels are those that the loss ignores",
        )
    return tree_map(_as_nan, sample)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, float) or (
        isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    )


def _as_nan(leaf: Any) -> Any:
    if not _is_floating(leaf):
        return leaf
    return torch.full_like(leaf, torch.nan) if isinstance(leaf, Tensor) else torch.nan
