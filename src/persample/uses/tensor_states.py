"""What the recorder knows of live tensors: a weak table from tensor to mark."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..layouts import Additive, Layout, Mixed, Place, State, painted_through, place_of, whole_of
from .marks import EXCLUDED, SAMPLES, SELECTED, Derived, Mark, has_memory, same, unseen, version
from .results import Known, Results

_MOST = 8  # explicit ids of one shape that are compared


class Memory(NamedTuple):
    """What was computed into some memory, for as long as it is not given back."""

    storage: Any
    view: Place
    state: State
    batches: int


class TensorStates:
    """Weak table: entries die with their tensors, ids are never reused while an entry lives.

    A tensor saved inside a recomputation (checkpointing inside checkpointing) outlives its Python
    object and comes back as another one: there, ``memories`` knows it by its memory.
    """

    __slots__ = (
        "_aliased", "_explicit", "_forget", "_lent", "_table", "batches", "made", "memories", "n",
        "results",
    )  # fmt: skip

    def __init__(self) -> None:
        self._table: dict[int, Mark] = {}
        self.results = Results()  # of repeated calls; they get marks when the table is looked at
        self.n: int | None = None
        self.batches = 0  # what the results of the call that runs are computed from
        self.memories: list[Memory] | None = None  # a list while a backward pass runs
        self.made: list[Tensor] | None = None  # a list while a function's results are kept alive
        self._lent: dict[int, tuple[weakref.ref[Tensor], Mark]] = {}
        self._explicit: dict[Any, list[Layout]] = {}
        self._aliased: set[int] = set()  # memory of constants that ``.data`` gave away
        table = self._table

        def forget(ref: Any) -> None:
            table.pop(ref.key, None)

        self._forget = forget

    @property
    def table(self) -> dict[int, Mark]:
        """The marks of all live tensors, by id."""
        self.settle()
        return self._table

    def settle(self) -> None:
        """Mark the results of repeated calls."""
        if self.results.marked < len(self.results.each):
            for ref, version, known, source in self.results.unmarked():
                tensor = ref()
                if tensor is not None and id(tensor) not in self._table:
                    self._mark(tensor, version, known, None if source is None else source())

    def _mark(self, tensor: Tensor, version: int, known: Known, source: Tensor | None) -> None:
        """Mark a result as its call would have marked it; ``version`` is from then."""
        mark = self._table[id(tensor)] = Mark(tensor, self._forget)
        mark.key, mark.state, mark.history = id(tensor), known.state, known.grad
        mark.batches = known.batches
        like = self.relative(tensor, source, detached=known.detached) if known.aliasing else None
        if like is None:
            mark._family, mark._version, mark.epoch = None, version, 0
        else:  # the family was written to since: out of date
            mark._family = family = like.family
            mark.epoch = family.epoch if family.version == version else family.epoch - 1

    def relative(self, tensor: Tensor, source: Tensor | None, *, detached: bool) -> Mark | None:
        """The mark of a tensor that shares memory with a result of ``source``."""
        base = tensor._base
        if base is None:
            return self._table.get(id(source)) if detached else None
        known = self._table.get(id(base))
        if known is None and source is not None and source._base is base:
            return self._table.get(id(source))  # two views of what no one else sees
        return known

    def clear(self) -> None:
        """Forget every tensor."""
        self.results.clear()
        self._table.clear()
        self._explicit.clear()

    def put(self, tensor: Tensor, state: State | Derived, like: Mark | None = None) -> None:
        """Remember a tensor's state; ``like`` is the mark of a tensor it shares memory with."""
        table, key = self.table, id(tensor)
        if state.__class__ is Layout and state.ids is not None and state.coupled is None:
            state = self._one(state, state.ids)
        known = table.get(key)
        if known is not None:
            known.state, known.history = state, tensor.requires_grad
            known.batches = self.batches
            known.family.version = version(tensor)
            known.epoch = known.family.epoch
            return
        mark = table[key] = Mark(tensor, self._forget)
        mark.key, mark.state, mark.history = key, state, tensor.requires_grad
        mark.batches = self.batches
        if like is None:
            mark._family, mark._version, mark.epoch = None, version(tensor), 0
        else:
            mark._family = family = like.family
            mark.epoch = family.epoch
        if self.memories is not None and isinstance(state, SAMPLES) and has_memory(tensor):
            storage = StorageWeakRef(tensor.untyped_storage())
            self.memories.append(Memory(storage, place_of(tensor), state, self.batches))
            if self.made is not None:
                self.made.append(tensor)

    def _one(self, layout: Layout, ids: Tensor) -> Layout:
        """The same object for the same explicit ids: calls on them can be learned."""
        known = self._explicit.setdefault((ids.shape, ids.device), [])
        for other in known:
            if other.ids is ids or torch.equal(cast(Tensor, other.ids), ids):
                return other
        if len(known) < _MOST:
            known.append(layout)
        return layout

    def lend(self, alias: Tensor, source: Tensor) -> None:
        """``.data`` shares memory with its tensor, but counts writes for itself."""
        lender = self._lender(source) or self.table.get(id(source))
        if lender is not None:
            self._lent[id(alias)] = weakref.ref(alias), lender

    def alias(self, constant: Tensor) -> None:
        """Somebody took ``.data`` of a constant: writes to it will not be counted for it."""
        if has_memory(constant):
            self._aliased.add(constant.untyped_storage()._cdata)

    def _warn(self, tensor: Tensor) -> None:
        """Samples were written to such memory: what is known of it by other names is doubtful."""
        where, known = tensor.untyped_storage()._cdata, self.table.get(id(tensor))
        for mark in list(self.table.values()) if where in self._aliased else ():
            other = mark()
            if other is None or (known is not None and mark.family is known.family):
                continue
            if has_memory(other) and other.untyped_storage()._cdata == where:
                mark.family.epoch += 1

    def _lender(self, tensor: Tensor) -> Mark | None:
        alias, lender = self._lent.get(id(tensor), (None, None))
        return lender if alias is not None and alias() is tensor else None

    def _tell(self, tensor: Tensor) -> None:
        """Memory was written to that others know by ``.data``, or that was known by it."""
        base = tensor if tensor._base is None else tensor._base
        lender = self._lender(base) or self.table.get(id(base))
        if lender is None:
            return
        lender.family.epoch += 1
        for key, (alias, other) in self._lent.items():
            if other.family is lender.family and alias() is not None and key in self.table:
                self.table[key].family.epoch += 1

    def rewrite(self, tensor: Tensor, state: State | Derived, changed: bool) -> None:
        """An operator seen by the recorder wrote into the tensor."""
        if changed and isinstance(state, (Layout, Additive, Mixed)):
            if self._lent:
                self._tell(tensor)
            if self._aliased and has_memory(tensor):
                self._warn(tensor)
        known = self.table.get(id(tensor))
        if known is not None and changed:
            known.family.epoch += 1
        if self.memories is not None and changed and has_memory(tensor):
            written = tensor.untyped_storage()._cdata
            self.memories[:] = [m for m in self.memories if m.storage.cdata != written]
        self.put(tensor, state)
        if tensor.requires_grad:
            self.table[id(tensor)].family.history = True
        base = tensor._base
        if base is not None and isinstance(state, Derived) and changed:
            self._derive_through(tensor, base, state)
        if base is not None and isinstance(state, (Layout, Mixed)):
            known = self.table.get(id(base))
            if known is None or changed:
                self._write_through(tensor, base, state)
            else:
                known.history = base.requires_grad

    def _derive_through(self, view: Tensor, base: Tensor, state: Derived) -> None:
        """Constants or parameters were written to a part of what is derived from parameters.

        Autograd follows that itself. Other parts of it are not what they were.
        """
        known, family = self.table.get(id(base)), self.table[id(view)].family
        if known is None or not isinstance(known.state, Derived) or known.family is not family:
            return
        if known.epoch == family.epoch - 1 and base.requires_grad:  # up to date but for this write
            selected = known.state.selected or state.selected
            known.state = SELECTED if selected else EXCLUDED
            known.epoch = family.epoch

    def _write_through(self, view: Tensor, base: Tensor, state: Layout | Mixed) -> None:
        """A write into a view is a write into the tensor it is a view of."""
        known = self.table.get(id(base))
        before = known.state if known is not None else None
        after: State = state
        if isinstance(state, Layout):
            whole = whole_of(state, view, base, self.n)
            if whole is None or not (before is None or same(before, whole)):
                whole = painted_through(state, view, base, before, self.n)
            after = whole or unseen("a view of it was written to, with samples elsewhere")
        family = self.table[id(view)].family
        if known is None:
            self.put(base, after)
            self.table[id(base)].family = family
            self.table[id(base)].epoch = family.epoch
        else:
            known.state, known.history = after, base.requires_grad
            known.family.version = version(base)
            known.epoch = known.family.epoch
            known.family.history = known.family.history or base.requires_grad

    def hooks(self) -> dict[int, int]:
        """How many hooks tensors have, by their ids."""
        with torch._C.DisableTorchFunction():
            alive = [
                tensor
                for tensor in (mark() for mark in [*self.table.values()])
                if tensor is not None
            ]
            return {id(t): len(t._backward_hooks) for t in alive if t._backward_hooks}

    def twin(self, tensor: Tensor) -> State | Derived | None:
        """The state of a live tensor that is the same memory seen the same way."""
        if not has_memory(tensor):
            return None
        found = self._mark_at(place_of(tensor)) or self._memory_at(place_of(tensor))
        if found is None:
            return None
        self.put(tensor, found.state)
        self.table[id(tensor)].batches = found.batches
        return found.state

    def _mark_at(self, place: Place) -> Mark | None:
        for mark in list(self.table.values()):
            other = mark() if isinstance(mark.state, SAMPLES) else None
            if other is not None and has_memory(other) and place_of(other) == place:
                return mark
        return None

    def _memory_at(self, place: Place) -> Memory | None:
        memories = self.memories or []
        memories[:] = [m for m in memories if not m.storage.expired()]
        return next((m for m in memories if m.view == place), None)

    def get(self, tensor: Tensor) -> Mark | None:
        """The mark, if the tensor is still what it was when it was marked."""
        mark = self._table.get(id(tensor))
        if mark is None:
            line = self.results.find(tensor)
            if line is None:
                return None
            if line[2].aliasing:
                mark = self.table[id(tensor)]
            else:
                self._mark(tensor, line[1], line[2], None)
                mark = self._table[id(tensor)]
        family = mark.family
        if family.version != version(tensor) or mark.epoch != family.epoch:
            mark.state = unseen("it, or a tensor that shares its memory, was written to")
            mark.history = True
            family.version, family.epoch = version(tensor), family.epoch + 1
            mark.epoch = family.epoch
        return mark
