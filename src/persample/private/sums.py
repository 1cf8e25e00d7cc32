"""Sums over the micro-batches of one batch, in float32 at least."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Sums:
    """Σ of clipped gradients, for every trainable parameter, used or not.

    >>> import torch
    >>> sums = Sums({"w": torch.zeros(2)})
    >>> sums.add({"w": torch.ones(2)})
    >>> sums.add({"w": torch.ones(2)})
    >>> sums.total()["w"]
    tensor([2., 2.])
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._found: dict[str, Tensor] = {}

    def add(self, found: Mapping[str, Tensor]) -> None:
        """Add one micro-batch's clipped sums."""
        if not self._found:  # the first are taken over
            taken: set[int] = set()
            self._found = {name: self._own(name, value, taken) for name, value in found.items()}
            return
        for name, value in found.items():
            self._found[name].add_(value)

    def total(self) -> dict[str, Tensor]:
        """All parameters in their order; zeros where there was no sample."""
        return {
            name: self._found[name]
            if name in self._found
            else torch.zeros(tuple(p.shape), dtype=wide(p.dtype), device=p.device)
            for name, p in self._parameters.items()
        }

    def _own(self, name: str, value: Tensor, taken: set[int]) -> Tensor:
        """A contiguous tensor that nobody else holds, so that it can be added to.

        ``taken``: memory that other sums have. A tensor that is a part of its memory is copied.
        """
        own = value.detach().to(wide(self._parameters[name].dtype))
        storage = own.untyped_storage()
        alone = storage.nbytes() == own.nbytes and storage.data_ptr() not in taken
        if alone and own.is_contiguous():
            taken.add(storage.data_ptr())
            return own
        return own.clone(memory_format=torch.contiguous_format)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and noise: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
