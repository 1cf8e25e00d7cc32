"""What the user says of tensors: where their samples are."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import UsageError, describe, here
from .layout import Constant, closed, explicit
from .propagate.reshaping import squeeze_colours
from .requests import expect_ids, shown, whole
from .values import memory_of

if TYPE_CHECKING:
    from .recorder import Recorder


class Declared:
    """The user's own marks."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.patterns: list[Tensor] = []  # the sample of every row, as the user said it
        self.storages: set[int] = set()  # memory of the caller's, who may refill it unseen
        self.kept: list[Tensor] = []  # where they are needed again: lean recordings
        self.given: list[weakref.ref[Tensor]] = []  # results that the caller may hold; the same

    def callers(self, tensor: Tensor, *, received: bool = True) -> None:
        """The caller may write to it unseen: what is kept of it will be a copy, or watched."""
        memory = memory_of(tensor)
        if memory:
            self.storages.add(memory)
            if self.recorder.lean and received:
                self.kept.append(tensor)
            elif self.recorder.lean:
                self.given.append(weakref.ref(tensor))

    def callers_now(self) -> list[Tensor]:
        """What a lean recording depends on, and the caller may write to."""
        return [*self.kept, *(t for t in (ref() for ref in self.given) if t is not None)]

    def mark(self, tensor: Tensor, *, dim: int = 0, ids: Tensor | None = None) -> None:
        """The user says where the samples are."""
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise UsageError(
                f"mark takes a tensor with at least one axis, got {shown(tensor)}",
                fix="tape.mark(x, dim=0) for data whose axis 0 holds the samples",
            )
        dim = whole(dim, "dim")
        if not -tensor.dim() <= dim < tensor.dim():
            raise UsageError(
                f"no axis {dim} in a tensor of shape {tuple(tensor.shape)}",
                fix="dim is the axis that holds the samples",
            )
        axis = dim % tensor.dim()
        size = tensor.shape[axis]
        with torch._C.DisableTorchFunction():
            self._expect_unknown(tensor)
            self.recorder.custom.expose(tensor)
            if ids is not None:
                self._mark_ids(tensor, axis, ids)
                self.callers(tensor)
                return
            if self.recorder.n is None:
                self.recorder.n = size
            if size != self.recorder.n:
                raise UsageError(
                    f"axis {axis} of a tensor {tuple(tensor.shape)} does not hold "
                    f"{self.recorder.n} samples",
                    fix="several forwards in one recording must have the same samples; "
                    "give ids= for rows that are not one per sample",
                )
            self.recorder.marks.put(tensor, closed(axis))
            self.callers(tensor)

    def _expect_unknown(self, tensor: Tensor) -> None:
        """What was computed from parameters holds its samples where the recorder saw them go."""
        known = self.recorder.look(tensor) if tensor.requires_grad else None
        if known is not None and not isinstance(known, Constant):
            raise UsageError(
                f"a tensor {tuple(tensor.shape)} that depends on parameters cannot be marked",
                where=describe(here()),
                why="its gradients have been followed already, and a mark would not move them",
                fix="mark the data that the model is called with",
            )

    def _mark_ids(self, tensor: Tensor, axis: int, ids: Tensor) -> None:
        size = tensor.shape[axis]
        if self.recorder.n is None:
            raise UsageError("ids need the number of samples", fix="record(model, n=...)")
        expect_ids(ids, "ids")
        if ids.shape != (size,):
            raise UsageError(
                f"ids must have shape ({size},), got {tuple(ids.shape)}",
                fix="one number for every index of the axis dim",
            )
        if size and not (int(ids.min()) >= -1 and int(ids.max()) < self.recorder.n):
            raise UsageError(
                f"ids must lie between -1 and {self.recorder.n - 1}", fix="-1 is a row of nobody"
            )
        view = [1] * tensor.dim()
        view[axis] = size
        colours = ids.to(tensor.device, torch.long, copy=True).view(view)
        self.patterns.append(colours.flatten())
        colours = squeeze_colours(colours, self.recorder.n)
        self.recorder.marks.put(tensor, explicit(colours, self.recorder.n))
