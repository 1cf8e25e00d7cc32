"""One torch call inside a recording: who takes part in it, and where the samples go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .engine import ENGINE, expect_reached, run_backward, run_grad, run_nested
from .enter import entered, kept
from .entries import own
from .errors import Reason, here
from .layout import CONSTANT, PURE, Additive, Layout, Mixed, State
from .marks import EXCLUDED, SELECTED, Derived, Mark, same, unseen, version
from .meeting import meet, not_per_sample
from .nodes import graph_node
from .parties import Coloured, Parties, Sorting, Transformed
from .propagate import COND, SET_DATA, ZEROS, Operator, apart_by_zeros, collect, propagate
from .use import Lookup
from .walls import Finite

if TYPE_CHECKING:
    from .recorder import Recorder

_NOTHING = object()

# What layout rules said of calls in which closed layouts and shapes decide.
_KNOWN: dict[tuple[Any, ...], Any] = {}
_LIMIT = 1 << 14


class Calls:
    """Handles every call that the recorder's mode sees."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.entering: list[Any] = []
        self._marks = recorder.marks
        self._table = recorder.marks.table
        self._slots = recorder.parameters.slots
        self._custom, self._soiled = recorder.custom, recorder.soiled
        self._sorted = Sorting(recorder)

    def handle(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Any call that is not a mere look at an attribute."""
        if operator.graph:
            if func in ENGINE:
                return self._engine(func, args, kwargs)
            if operator.name == "grad_fn":
                return graph_node(self._custom, func(*args))
            if func is Tensor.register_hook:
                self._leaves_its_module(args[0])
                hook = self._custom.guarded(args[0], *args[1:], **kwargs)
                return func(args[0], hook)  # type: ignore[no-untyped-call]
            if operator.name == SET_DATA:
                return self._exchange(func, *args)
            if operator.name == COND:
                return self._branch(*args, **kwargs)
        if operator.enter and func not in self.entering and not operator.straight(args, kwargs):
            return self._enter(func, args, kwargs)
        parties = None
        try:
            parties = self._sorted(operator, args, kwargs)
        except Transformed:  # what comes out of the transform is nobody's
            self.recorder.transforming = True
        if parties is None:
            return func(*args, **kwargs)
        wanted = torch.is_grad_enabled()
        if parties.coloured:
            if wanted:
                self._custom.leave()
            else:
                self._custom.read(parties.coloured)
        if parties.loose and wanted and (parties.owned or self.recorder.lean):
            derived = bool(parties.owned) and not parties.data
            self.recorder.constants.note(parties.loose, derived=derived)
        if parties.owned and not wanted and self.recorder.parameters.partial:
            expect_reached(self.recorder, parties.owned)
        if not parties.owned:
            if not parties.coloured:
                return func(*args, **kwargs)
            return self._data(operator, func, args, kwargs, parties)
        if not parties.data:
            return self._derive(operator, func, args, kwargs, parties)
        if not wanted:
            return self._data(operator, func, args, kwargs, parties)
        if parties.key is None:
            bad = not_per_sample(operator, parties.coloured)
            if bad is not None:
                out = func(*args, **kwargs)
                result, written = args[0] if operator.inplace else out, operator.inplace
                self._store(operator, result, bad, parties.coloured, written=written)
                return out
        return meet(self, operator, func, args, kwargs, parties)

    # ------------------------------------------------------------------ ways to run it

    def _leaves_its_module(self, tensor: Tensor) -> None:
        """fully_shard hooks what its modules return; a tensor derived from parameters is lost."""
        spread = self.recorder.spread
        if (
            spread is not None
            and spread.sharded
            and isinstance(self.recorder.look(tensor), Derived)
        ):
            why = "it is derived from parameters whose memory is freed when their module returns"
            fix = "compute it where it is used, or shard both modules as one group"
            reason = Reason("fully_shard", why, (tuple(tensor.shape),), here(), fix)
            self._marks.put(tensor, Mixed(reason))

    def _exchange(self, func: Any, tensor: Tensor, value: Tensor) -> None:
        """``tensor.data = value``: the samples are where the value has them, the graph is not."""
        func(tensor, value)
        known, state = self._table.get(id(tensor)), self.recorder.look(value)
        if not isinstance(state, (Layout, Additive, Mixed)):
            return
        if id(tensor) in self._slots:
            self._marks.put(tensor, unseen("its .data was exchanged for data of the samples"))
            return
        if known is None or not same(known.state, state):
            if tensor.requires_grad:
                state = unseen("its .data was exchanged for data with samples elsewhere")
            self._marks.put(tensor, state)

    def _enter(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a Python function of torch with the recorder watching its body.

        A C function may report itself under the name of the Python function that calls it; met
        again inside, the name means the C function.
        """
        self.entering.append(func)
        try:
            with self.recorder.mode:
                return entered(func)(*args, **kwargs)
        finally:
            self.entering.pop()

    def _branch(self, chosen: Any, first: Any, second: Any, operands: Any) -> Any:
        """``torch.cond``: run one of the branches, as Python does."""
        with self.recorder.mode:
            return (first if chosen else second)(*operands)

    def _engine(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``loss.backward()`` and ``torch.autograd.grad`` inside the block."""
        if func is torch.autograd.grad:
            return run_grad(self.recorder, args, kwargs)
        if self.recorder.busy:
            run_nested(self.recorder, func, args, kwargs)
        else:
            run_backward(self.recorder, args, kwargs)
        return None

    def states(
        self,
        operator: Operator,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        parties: Parties,
    ) -> Any:
        """The states of a call's results, remembered where shapes decide."""
        key, found = parties.key, _NOTHING
        if key is not None:
            try:
                found = _KNOWN.get(key, _NOTHING)
            except TypeError:  # an argument that cannot be compared
                key = None
        if found is _NOTHING:
            n = self._marks.n or 0
            found = propagate(operator, func, args, kwargs, out, parties.coloured, n)
            if key is not None and _lasting(found):
                if len(_KNOWN) >= _LIMIT:
                    _KNOWN.clear()
                _KNOWN[key] = found
        return found

    def _data(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        parties: Parties,
    ) -> Any:  # fmt: skip
        """No parameter is involved, or no gradient is wanted: run, then follow the samples."""
        seen = tuple(args)
        if operator.inplace and operator.aliasing:  # the shape before the call matters
            before = args[0].detach()
            seen = (before, *args[1:])
            parties.coloured = [(before if t is args[0] else t, s) for t, s in parties.coloured]
        out = func(*args, **kwargs)
        result = args[0] if operator.inplace and args else out
        states = self.states(operator, func, seen, kwargs, result, parties)
        plain = parties.key is not None and states.__class__ is Layout
        if plain and result.__class__ is Tensor and "out" not in kwargs:
            like = None
            if operator.aliasing:
                like = self._memory(operator, result, parties.coloured[0][0])
            self._marks.put(result, states, like)
        else:
            if operator.name in ZEROS and isinstance(states, (Additive, Mixed)):
                states = self._by_zeros(operator, seen, kwargs, result, parties) or states
            written = operator.inplace or "out" in kwargs
            self._store(operator, result, states, parties.coloured, written=written)
        return out

    def _by_zeros(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any,
        parties: Parties,
    ) -> Layout | None:  # fmt: skip
        """A product in which samples meet by its shapes, but not by its values."""
        if parties.owned:
            return None
        n = self._marks.n or 0
        found = apart_by_zeros(operator, args, kwargs, out, parties.coloured, n)
        if found is not None:
            tensors: list[Tensor] = []
            collect([*args, *kwargs.values()], tensors)
            samples = {id(t) for t, state in parties.coloured if isinstance(state, Layout)}
            self.recorder.by_zeros.note(
                [t for t in tensors if out.requires_grad and id(t) not in samples],
                masks=operator.name == "scaled_dot_product_attention",
            )
            if out.grad_fn is not None:
                out.grad_fn.register_hook(Finite(self.recorder.tape_ref, operator.name, here()))
        return found

    def _derive(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        parties: Parties,
    ) -> Any:  # fmt: skip
        """Parameters and constants only: the result is derived from parameters."""
        owned = parties.owned
        derived = SELECTED if any(self.recorder.is_selected(t) for t in owned) else EXCLUDED
        if operator.name == "embedding" and derived is SELECTED:
            derived = Derived(True, self._lookup(*args, **kwargs))
        with kept():
            out = func(*args, **kwargs)
        outs: list[Tensor] = []
        collect(args[0] if operator.inplace and args else out, outs)
        for tensor in outs:
            if tensor.requires_grad and id(tensor) not in self._slots:
                if operator.inplace:
                    self._marks.rewrite(tensor, derived, changed=True)
                elif tensor is not owned[0]:  # to() may return its argument
                    like = self._memory(operator, tensor, owned[0])
                    rows = self._same_rows(tensor, owned) if operator.aliasing else None
                    self._marks.put(tensor, derived if rows is None else rows, like)
                    if not torch.is_grad_enabled():  # a custom function may return this view
                        self._table[id(tensor)].history = False
            elif _made(operator, tensor, kwargs, [*owned, *(t for t, _ in parties.coloured)]):
                if derived is SELECTED or any(state is PURE for _, state in parties.coloured):
                    self._marks.put(tensor, PURE)
        return out

    def _same_rows(self, tensor: Tensor, owned: list[Tensor]) -> Derived | None:
        """What is known of rows picked from a table also holds for a view that keeps them."""
        rows, state = owned[0], self.recorder.look(owned[0])
        if not isinstance(state, Derived) or state.lookup is None or len(owned) > 1:
            return None
        kept = tensor.dtype == rows.dtype and tensor.shape[-1:] == rows.shape[-1:]
        whole = tensor.numel() == rows.numel() and tensor.data_ptr() == rows.data_ptr()
        return state if kept and whole and rows.is_contiguous() and tensor.is_contiguous() else None

    def _lookup(
        self, weight: Tensor, indices: Tensor, padding_idx: int = -1,
        scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Lookup | None:  # fmt: skip
        """The arguments of torch.embedding; None where its gradient is not just rows."""
        slot = self._slots.get(id(weight))
        if slot is None or slot.name is None or scale_grad_by_freq:
            return None
        kept = own(indices, self.recorder.inputs.storages)
        return Lookup(slot.name, kept, padding_idx, weight.shape, version(kept))

    # ------------------------------------------------------------------ what is known afterwards

    def _store(
        self, operator: Operator, out: Any, states: Any, coloured: Coloured, *, written: bool
    ) -> None:
        """Mark an operator's results; ``written``: they were there before."""
        outs: list[Tensor] = []
        collect(out, outs)
        each = states if isinstance(states, list) else [states] * len(outs)
        for tensor, state in zip(outs, each, strict=True):
            if state is None and tensor.requires_grad and not tensor.is_leaf:
                state = CONSTANT
            elif state is None and all(s is PURE for _, s in coloured):
                state = PURE if _made(operator, tensor, {}, [t for t, _ in coloured]) else None
            if written:
                self._rewrite(tensor, state)
            elif state is not None:
                self._marks.put(tensor, state, self._memory(operator, tensor, coloured[0][0]))
                if operator.name == "view_as":
                    # torch itself views an argument that a custom function returns as it is, and
                    # gives the view the function's node afterwards: look again
                    self._table[id(tensor)].history = False

    def _rewrite(self, tensor: Tensor, state: State | None) -> None:
        known = self._table.get(id(tensor))
        if known is None and state is None:
            return
        self._soiled.add(tensor, known, state)
        before = known.state if known is not None else None
        self._marks.rewrite(tensor, state or CONSTANT, changed=not same(before, state or CONSTANT))

    def _memory(self, operator: Operator, out: Tensor, source: Tensor) -> Mark | None:
        """The mark of a tensor that shares its memory with a result."""
        if not operator.aliasing:
            return None
        base = out._base
        if operator.name == "data":
            self._custom.taken.lend(out)
            self._marks.lend(out, source)
        if base is None:
            return self._table.get(id(source)) if operator.name == "detach" else None
        known = self._table.get(id(base))
        if known is None and source._base is base:  # two views of what nobody else sees
            return self._table.get(id(source))
        return known


def _made(
    operator: Operator, tensor: Tensor, kwargs: dict[str, Any], given: Sequence[Tensor]
) -> bool:
    """Whether a result without gradient is new, not an argument or a part of one.

    It may be a view of what the operator made inside (an einsum that ends by a transposition).
    """
    if operator.inplace or "out" in kwargs or tensor.requires_grad:
        return False
    base = tensor._base
    if base is None:
        return True
    return not operator.aliasing and all(base is not t and base is not t._base for t in given)


def _lasting(states: Any) -> bool:
    """Whether states hold for every call with the same key: no reasons, no tensors in them."""
    each = states if isinstance(states, list) else [states]
    return all(
        state is None
        or (isinstance(state, Layout) and state.ids is None and state.coupled is None)
        or (isinstance(state, Additive) and state.coupled is None)
        for state in each
    )
