"""The mark of one tensor: its state, and what would show an unseen change."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..autograd_graph import of_user
from ..errors import LOOP, Reason, here
from ..layouts import Additive, Layout, Mixed, State
from .use import Lookup


class Derived:
    """Computed from parameters only; ``selected`` if one of them is recorded.

    ``lookup`` says how, where it was rows of a recorded table, chosen by constants.
    """

    __slots__ = ("lookup", "selected")

    def __init__(self, selected: bool, lookup: Lookup | None = None) -> None:
        self.selected, self.lookup = selected, lookup


SELECTED, EXCLUDED = Derived(True), Derived(False)


class Family:
    """Tensors that share memory share a version counter; what was seen of it last."""

    __slots__ = ("epoch", "history", "version")

    def __init__(self, version: int) -> None:
        self.version, self.epoch, self.history = version, 0, False


class Mark(weakref.ref[Tensor]):
    """One tensor's state, and what would show an unseen change.

    Most tensors have no relatives: a family is made when it is needed.
    """

    __slots__ = ("_family", "_version", "batches", "epoch", "history", "key", "state")
    _family: Family | None
    _version: int
    batches: int  # which batches it was computed from; see uses/batches.py
    epoch: int
    history: bool
    key: int
    state: State | Derived

    @property
    def family(self) -> Family:
        """The tensors it shares memory with."""
        if self._family is None:
            self._family = Family(self._version)
        return self._family

    @family.setter
    def family(self, value: Family) -> None:
        self._family = value

    def unchanged(self, tensor: Tensor) -> bool:
        """Whether nothing suggests a second look."""
        family = self._family
        try:
            if family is None:
                if self._version != tensor._version:
                    return False
            elif family.version != tensor._version or self.epoch != family.epoch:
                return False
        except RuntimeError:  # inference tensors count no versions
            return False
        return self.history or not tensor.requires_grad


_VERSION = attrgetter("_version")


def version(tensor: Tensor) -> int:
    """The version counter; inference tensors have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """The version counter of each."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [version(tensor) for tensor in tensors]


SAMPLES = (Layout, Additive, Mixed)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is some elements of one piece of memory."""
    return tensor.layout is torch.strided and tensor.numel() > 0 and not transformed(tensor)


def transformed(tensor: Tensor) -> bool:
    """Whether a tensor stands for another inside a torch.func transform."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def innermost(tensor: Tensor) -> Tensor:
    """The tensor that another stands for inside transforms."""
    while transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def gained_history(mark: Mark, tensor: Tensor) -> bool:
    """Whether something unseen made the tensor part of a graph since it was marked.

    A write to a relative makes it part of one, but of no function of the user's own.
    """
    node = None if mark.history or not tensor.requires_grad else tensor.grad_fn
    return node is not None and (not mark.family.history or of_user(node))


def unseen(why: str) -> Mixed:
    """The state of a tensor that something unseen had to do with."""
    return Mixed(
        Reason(
            "an unseen operator",
            f"persample cannot follow this tensor: {why}",
            (),
            here(),
            LOOP,
        )
    )


def same(before: Any, after: Any) -> bool:
    """Whether a write left the colours where they were."""
    if before is after:
        return True
    if isinstance(before, Additive) and isinstance(after, Additive):
        return before.coupled is after.coupled
    if isinstance(before, Layout) and isinstance(after, Layout):
        if before.coupled is not after.coupled:
            return False
        if before.ids is None and after.ids is None:
            return before.axis == after.axis and before.inner == after.inner
        if before.ids is None or after.ids is None:
            return False
        if before.ids.dim() != after.ids.dim():
            return False
        # an axis along which the colour does not change may be written out, or not
        pairs = list(zip(before.ids.shape, after.ids.shape, strict=True))
        if any(a != b and 1 not in (a, b) for a, b in pairs):
            return False
        return torch.equal(*torch.broadcast_tensors(before.ids, after.ids))
    return False
