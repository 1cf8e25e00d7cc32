"""Whether tensors still hold what they held: parameters in backward, for instance.

Version counters tell of most writes, but not of those of fused optimizers, through ``.data``, or by
NumPy. Some elements of every tensor are kept: a step changes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from .conditions import equal

_LOOKS = 64  # elements of each tensor that are kept


class Constants:
    """Tensors without samples or parameters that met some: masks, indices, labels, code books.

    Nobody announces when they are refilled. They are not held: who refills them does that.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Tensor], bool]] = {}

    def __bool__(self) -> bool:
        return bool(self._seen)

    def note(self, tensors: Iterable[Tensor], *, derived: bool) -> None:
        """These met parameters; ``derived``: parameters alone, so that a graph may need them."""
        for tensor in tensors:
            before = self._seen.get(id(tensor))
            also = before is not None and before[0]() is tensor and before[1]
            self._seen[id(tensor)] = (weakref.ref(tensor), derived or also)

    def alive(self, *, derived: bool = False) -> list[Tensor]:
        """Those that somebody holds; all of them, or only those behind derived tensors."""
        found = [(ref(), behind) for ref, behind in self._seen.values()]
        return [t for t, behind in found if t is not None and (behind or not derived)]

    def within(self, kept: Iterable[Tensor]) -> list[Tensor]:
        """Those whose memory is kept to be computed from."""
        memory = {_memory(tensor) for tensor in kept}
        return [tensor for tensor in self.alive() if _memory(tensor) in memory]

    def clear(self) -> None:
        """Forget them."""
        self._seen.clear()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


class Values:
    """Some elements of tensors, as they were."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # the views hold on to their memory: after ``tensor.data = other`` it lies elsewhere
        self._kept = [
            (tensor, tensor.data_ptr(), _some(tensor))
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


def _some(tensor: Tensor) -> Tensor:
    """A view of elements all over a tensor; of one line, where there are gaps in its memory."""
    flat, extent = tensor.detach(), tensor.numel()
    if not tensor.is_contiguous():
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    if extent != tensor.numel():
        return flat[(0,) * (tensor.dim() - 1)]
    return flat.as_strided((min(extent, _LOOKS),), (max(1, extent // _LOOKS),))
