"""Whether tensors still hold what they held.

Version counters tell of most writes, but not of those of fused optimizers, through ``.data``, or by
NumPy. Some elements of every tensor are kept: a step, or another batch, changes them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..run_state import equal

_LOOKS = 64  # elements of each tensor that are kept


class Values:
    """Some elements of tensors, as they were."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # the views hold on to their memory: after ``tensor.data = other`` it lies elsewhere
        self._kept = [
            (tensor, tensor.data_ptr(), some_elements(tensor))
            for tensor in tensors
            if tensor.layout is torch.strided and not tensor.is_nested
        ]
        self._before = self._now()

    def _now(self) -> list[Tensor]:
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for _, _, some in self._kept:
            alike.setdefault((some.dtype, some.device), []).append(some)
        return [torch.cat(views) for views in alike.values()]

    def changed(self) -> bool:
        """Whether one of them is not what it was."""
        if any(tensor.data_ptr() != where for tensor, where, _ in self._kept):
            return True
        return not all(
            torch.equal(now, before) or equal(now, before)
            for now, before in zip(self._now(), self._before, strict=True)
        )


def some_elements(tensor: Tensor) -> Tensor:
    """A view of elements all over a tensor; of one line, where there are gaps in its memory."""
    flat, extent = tensor.detach(), tensor.numel()
    if not tensor.is_contiguous():
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    if extent != tensor.numel():
        return flat[(0,) * (tensor.dim() - 1)]
    return flat.as_strided((min(extent, _LOOKS),), (max(1, extent // _LOOKS),))
