"""Constants that data of the samples were written to, under whatever name they are known.

``buffer.data.copy_(h.mean(0))`` writes through a tensor that nobody sees again, and a view taken
before such a write shows what was written. Memory that was a constant's and no longer is one is
remembered, and every tensor that looks at it is taken for what was written there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..layouts import Layout, Place, State, colours_of, ids_of, place_of, shown_by
from .marks import SAMPLES, Mark, has_memory, unseen
from .parameters import Parameters
from .tensor_states import TensorStates


class WrittenConstants:
    """What was written where, by storage; empty in most recordings."""

    __slots__ = ("_homes", "_marks", "_parameters", "written")

    def __init__(self, marks: TensorStates, parameters: Parameters) -> None:
        self._marks, self._parameters = marks, parameters
        self.written: dict[int, tuple[StorageWeakRef, dict[Place, State]]] = {}
        self._homes: dict[int, list[Tensor]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self.written.clear()
        self._homes.clear()

    def add(self, tensor: Tensor, known: Mark | None, state: object) -> None:
        """An operator made a state of what a tensor held; others look at it if it was a constant.

        What had samples before is known by marks, with all that shares its memory.
        """
        if not isinstance(state, SAMPLES) or not has_memory(tensor) or self._marks.n == 1:
            return
        if known is not None and isinstance(known.state, SAMPLES) and not self.written:
            return
        storage = tensor.untyped_storage()
        if not self.written:
            for parameter in self._parameters.tensors.values():
                if has_memory(parameter):
                    where = parameter.untyped_storage()._cdata
                    self._homes.setdefault(where, []).append(parameter)
        _, places = self.written.setdefault(storage._cdata, (StorageWeakRef(storage), {}))
        places[place_of(tensor)] = state
        for parameter in self._homes.get(storage._cdata, ()):
            self._marks.put(parameter, unseen("data of the samples were written to it"))

    def known(self, tensor: Tensor) -> State | None:
        """What an unmarked tensor holds of the samples."""
        if not has_memory(tensor):
            return None
        storage, places = self.written.get(tensor.untyped_storage()._cdata, (None, {}))
        if storage is None or storage.expired():
            return None
        state, whole = places.get(place_of(tensor)), None
        if state is None:
            state, whole = self._part(tensor, places)
        if state is None:
            state = self._through(tensor, list(places.items()))
        self._marks.put(tensor, state, whole)
        return state

    def _part(
        self, tensor: Tensor, places: dict[Place, State]
    ) -> tuple[Layout, Mark] | tuple[None, None]:
        """Seen as a part of a whole that marks know: chunks that are written to one by one.

        What was written through ``.data`` marks do not know: every write must agree with them.
        """
        base = tensor._base
        mark = None if base is None else self._marks.get(base)
        layouts = {k: state for k, state in places.items() if isinstance(state, Layout)}
        if base is None or mark is None or len(layouts) < len(places):
            return None, None
        if not isinstance(mark.state, Layout):
            return None, None
        n = self._marks.n or 0
        part, written = (
            shown_by(mark.state, place_of(base), tensor, n),
            colours_of(layouts, tensor, n),
        )
        if part is None or written is None:
            return None, None
        known = ids_of(part, tensor.shape, n, tensor.device)
        agree = bool(((written < 0) | (written == known)).all())
        return (part, mark) if agree else (None, None)

    def holds(self, tensor: Tensor) -> bool:
        """Whether data of the samples were written to a tensor's memory, or may have been."""
        known = self.written
        return bool(known) and (not has_memory(tensor) or tensor.untyped_storage()._cdata in known)

    def _through(self, tensor: Tensor, places: Sequence[tuple[Place, State]]) -> State:
        """Seen another way than it was written."""
        if len(places) == 1:
            place, state = places[0]
            if not isinstance(state, Layout):
                return state
            found = shown_by(state, place, tensor, self._marks.n)
            if found is not None:
                return found
        return unseen("a tensor that shares its memory was written to, with samples elsewhere")
