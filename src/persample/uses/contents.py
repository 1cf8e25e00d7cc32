"""Whether tensors still hold what they held, and memory that the caller may write to, unseen.

Version counters tell of most writes, but not of those of fused optimizers, through ``.data``, or by
NumPy. Some elements of every tensor are kept: a step, or another batch, changes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import UsageError
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
    flat, extent = tensor.detach() if tensor.requires_grad else tensor, tensor.numel()
    if not tensor.is_contiguous():
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    if extent != tensor.numel():
        return flat[(0,) * (tensor.dim() - 1)]
    return flat.as_strided((min(extent, _LOOKS),), (max(1, extent // _LOOKS),))


class CallerMemory:
    """Inputs and results of the model. What is kept of them is a copy, or watched."""

    def __init__(self, *, lean: bool) -> None:
        self.storages: set[int] = set()
        self._lean = lean  # a lean recording runs over them again
        self._kept: list[Tensor] = []
        self._given: list[weakref.ref[Tensor]] = []
        self._entered: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # and what they held

    def add(self, tensor: Tensor, *, received: bool = True) -> None:
        """Note a tensor that the caller passed in (``received``), or was given."""
        memory = memory_of(tensor)
        if memory:
            self.storages.add(memory)
            if self._lean and received:
                self._kept.append(tensor)
            elif self._lean:
                self._given.append(weakref.ref(tensor))

    def enter(self, tensors: Iterable[Tensor]) -> None:
        """A call of the model was given tensors that were not known."""
        for tensor in tensors:
            if memory_of(tensor):
                held = some_elements(tensor).clone()
                self._entered[id(tensor)] = weakref.ref(tensor), held

    def expect_not_refilled(self, tensors: Iterable[Tensor]) -> None:
        """Refuse a later call with a known tensor that was filled with new samples, unseen."""
        for tensor in tensors:
            ref, held = self._entered.get(id(tensor), (None, None))
            if ref is None or held is None or ref() is not tensor:
                continue
            if equal(some_elements(tensor), held):
                continue
            raise UsageError(
                "a second batch in one recording: an input was filled with new data",
                why="the model is called again with a tensor that it was given before, and its "
                "contents were exchanged in between",
                fix="one record block for each micro-batch, with tape.set_grad(..., "
                "accumulate=True)",
            )

    def alive(self) -> list[Tensor]:
        """What a lean recording depends on, and the caller may write to."""
        return [*self._kept, *(t for t in (ref() for ref in self._given) if t is not None)]

    def copied(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy of it where it lies in the caller's memory."""
        if memory_of(tensor) in self.storages:
            return tensor.detach().clone()
        return tensor.detach() if tensor.requires_grad else tensor

    def clear(self) -> None:
        """Forget the tensors."""
        self._kept.clear()
        self._given.clear()
        self._entered.clear()


def memory_of(tensor: Tensor) -> int:
    """Where the memory begins that a tensor is in; 0 for one without such."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # of a class that wraps others
        return 0
