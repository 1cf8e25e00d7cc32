"""Constants that data of the samples were written to, under whatever name they are known.

``buffer.data.copy_(h.mean(0))`` writes through a tensor that nobody sees again, and a view taken
before such a write shows what was written. Memory that was a constant's and no longer is one is
remembered, and every tensor that looks at it is taken for what was written there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .layout import Additive, Layout, Mixed, State
from .marks import Mark, Marks, has_memory, unseen, view
from .parameters import Parameters
from .through import Place, shown_by

_SAMPLES = (Layout, Additive, Mixed)


class Soiled:
    """What was written where, by storage; empty in most recordings."""

    __slots__ = ("_homes", "_marks", "_parameters", "written")

    def __init__(self, marks: Marks, parameters: Parameters) -> None:
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
        if not isinstance(state, _SAMPLES) or not has_memory(tensor) or self._marks.n == 1:
            return
        if known is not None and isinstance(known.state, _SAMPLES) and not self.written:
            return
        storage = tensor.untyped_storage()
        if not self.written:
            for slot in self._parameters.slots.values():
                if has_memory(slot.tensor):
                    where = slot.tensor.untyped_storage()._cdata
                    self._homes.setdefault(where, []).append(slot.tensor)
        _, places = self.written.setdefault(storage._cdata, (StorageWeakRef(storage), {}))
        places[view(tensor)] = state
        for parameter in self._homes.get(storage._cdata, ()):
            self._marks.put(parameter, unseen("data of the samples were written to it"))

    def known(self, tensor: Tensor) -> State | None:
        """What an unmarked tensor holds of the samples."""
        if not has_memory(tensor):
            return None
        storage, places = self.written.get(tensor.untyped_storage()._cdata, (None, {}))
        if storage is None or storage.expired():
            return None
        state = places.get(view(tensor)) or self._through(tensor, list(places.items()))
        self._marks.put(tensor, state)
        return state

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
