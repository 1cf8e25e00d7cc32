"""Constants that must stay what they are: masks, indices, labels, code books.

Those that alone keep samples separate must also do so in backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..errors import Place
from ..uses import Context, memory_of
from .messages import not_finite_at_zeros

Grads = Sequence[Tensor | None]


class Constants:
    """Tensors without samples or parameters that were used with some: masks, indices, labels.

    No event announces a refill. They are not held: whoever refills them holds them, perhaps by
    the tensor that they were a view of. Memory that is not torch's (NumPy's) is refilled by
    others than tensors: such are held.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        self._views: list[_View] = []
        self._held: list[Tensor] = []
        self._memories: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._seen)

    def note(self, tensors: Iterable[Tensor], *, derived: bool) -> None:
        """These were used with parameters; ``derived``: alone, so that a graph may need them."""
        for tensor in tensors:
            before = self._seen.get(id(tensor))
            if before is not None and before[0]() is tensor and before[1] >= derived:
                continue
            ref = weakref.ref(tensor)
            self._seen[id(tensor)] = (ref, derived)
            with torch._C.DisableTorchFunction():
                memory = memory_of(tensor)
                if memory:
                    self._memories.add(memory)
                    if not tensor.untyped_storage().resizable():
                        self._held.append(tensor)
                    elif tensor._base is not None:
                        self._views.append(_View(tensor, ref, derived, memory))

    def reachable(self, *, derived: bool = False) -> list[Tensor]:
        """Those that someone still holds; all of them, or only those behind derived tensors."""
        found = [(ref(), behind) for ref, behind in self._seen.values()]
        found += [(view.region(), view.derived) for view in self._views]
        return [t for t, behind in found if t is not None and (behind or not derived)]

    def within(self, kept: Iterable[Tensor]) -> list[Tensor]:
        """What is kept to be computed from, where it is their memory."""
        return [tensor for tensor in kept if memory_of(tensor) in self._memories]


class _View:
    """Where a view lies in the memory of its base tensor, which may outlive it."""

    def __init__(
        self, tensor: Tensor, ref: weakref.ref[Tensor], derived: bool, memory: int
    ) -> None:
        assert tensor._base is not None
        self._ref, self._base, self.derived = ref, weakref.ref(tensor._base), derived
        self._place = (tensor.shape, tensor.stride(), tensor.storage_offset())
        self._memory = memory

    def region(self) -> Tensor | None:
        """The elements of a view that is gone, if their memory is still its base's."""
        base = self._base() if self._ref() is None else None
        if base is None or memory_of(base) != self._memory:
            return None
        return base.detach().as_strided(*self._place)


class Zeros:
    """Where constants were zero, or masks closed, that alone kept samples separate.

    Backward reads the constants again: a sample would be given gradients of another.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, Tensor, bool]] = []
        self._any = False

    def __bool__(self) -> bool:
        return self._any

    def note(self, constants: Iterable[Tensor], *, masks: bool) -> None:
        """These kept samples separate; torch keeps masks of truth values as numbers of its own."""
        self._any = True
        for tensor in constants:
            if tensor.dtype != torch.bool:
                self._seen.append((tensor, _open(tensor, masks=masks), masks))

    def changed(self) -> bool:
        """Whether one of them keeps others separate now."""
        return not all(
            torch.equal(_open(tensor, masks=masks), before) for tensor, before, masks in self._seen
        )

    def clear(self) -> None:
        """Forget them."""
        self._seen.clear()


def _open(tensor: Tensor, *, masks: bool) -> Tensor:
    value = tensor.detach()
    return value > torch.finfo(value.dtype).min / 2 if masks else value != 0


def expect_finite(
    context: weakref.ref[Context], operator: str, place: Place | None
) -> Callable[[Grads, Grads], None]:
    """A hook on a product whose zeros keep samples separate, before code of the user's own.

    That may make numbers of what another sample's overflow has left.
    """

    def passed(made: Grads, given: Grads) -> None:
        listening = context()
        if listening is not None and listening.backward.receiving:
            if not all(g is None or bool(g.isfinite().all()) for g in (*made, *given)):
                listening.backward.refuse(not_finite_at_zeros(operator, place))

    return passed
