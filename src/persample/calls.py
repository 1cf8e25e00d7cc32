"""One torch call inside a recording: who takes part in it, and where the samples go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .engine import ENGINE, expect_reached, run_backward, run_grad, run_nested
from .enter import entered, kept
from .errors import Reason, from_torch, from_us, here
from .layout import Additive, Layout, Mixed
from .marking import Marking
from .marks import Derived, same, unseen
from .meeting import meet, not_per_sample
from .nodes import GraphNode
from .parties import Parties, Sorting, Transformed
from .propagate import COND, SET_DATA, ZEROS, Operator, apart_by_zeros, collect, propagate
from .repeated import NOTHING, Repeats
from .walls import Finite

if TYPE_CHECKING:
    from .lean import Lean
    from .recorder import Recorder

# What layout rules said of calls in which closed layouts and shapes decide.
_KNOWN: dict[tuple[Any, ...], Any] = {}
_LIMIT = 1 << 14


class Calls:
    """Handles every call that the recorder's mode sees."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.entering: list[Any] = []
        # while one passes: a call in it is recomputed, and gradients behind it are compared
        self.passing: Lean | None = None
        self._marks = recorder.marks
        self._table = recorder.marks.table
        self._slots = recorder.parameters.slots
        self._custom, self._marking = recorder.custom, Marking(recorder)
        self._sorted = Sorting(recorder)
        self.repeats = Repeats(recorder)

    def handle(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Any call that is not a mere look at an attribute."""
        if self.passing is not None:
            self.passing.guarded = True
        if operator.graph:
            found = self._of_the_graph(operator, func, args, kwargs)
            if found is not NOTHING:
                return found
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
        if self.repeats.known:
            found = self.repeats.met(operator, func, args, kwargs, parties)
            if found is not NOTHING:
                return found
        if parties.key is None:
            bad = not_per_sample(operator, parties.coloured)
            if bad is not None:
                out = func(*args, **kwargs)
                result, written = args[0] if operator.inplace else out, operator.inplace
                self._marking.store(operator, result, bad, parties.coloured, written=written)
                return out
        return meet(self, operator, func, args, kwargs, parties)

    def _of_the_graph(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Calls that build, read or run the graph, or choose a branch of it."""
        if func in ENGINE:
            return self._engine(func, args, kwargs)
        if operator.name == "grad_fn":
            return self._node(func, args[0])
        if func is Tensor.register_hook:
            self._leaves_its_module(args[0])
            self.repeats.exposed(args[0])
            hook = self._custom.guarded(args[0], *args[1:], **kwargs)
            return func(args[0], hook)  # type: ignore[no-untyped-call]
        if operator.name == SET_DATA:
            return self._exchange(func, *args)
        if operator.name == COND:
            return self._branch(*args, **kwargs)
        return NOTHING

    def _node(self, func: Any, tensor: Tensor) -> Any:
        """``tensor.grad_fn``: itself for torch's own code (modules' hooks), else to look at only.

        Whoever is given the node may hook it, and those behind it.
        """
        node = func(tensor)
        if node is None or from_us():
            return node
        if not from_torch():
            return GraphNode(node)
        self._custom.exposed = True
        self.repeats.exposed(tensor, graph=True)
        return node

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
        key, found = parties.key, NOTHING
        if key is not None:
            try:
                found = _KNOWN.get(key, NOTHING)
            except TypeError:  # an argument that cannot be compared
                key = None
        if found is NOTHING:
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
                like = self._marking.memory(operator, result, parties.coloured[0][0])
            self._marks.put(result, states, like)
        else:
            if operator.name in ZEROS and isinstance(states, (Additive, Mixed)):
                states = self._by_zeros(operator, seen, kwargs, result, parties) or states
            written = operator.inplace or "out" in kwargs
            self._marking.store(operator, result, states, parties.coloured, written=written)
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
        derived = self._marking.derived(operator, args, kwargs, parties.owned)
        random = self.repeats.random_state(operator, parties.owned)
        with kept():
            out = func(*args, **kwargs)
        result = args[0] if operator.inplace and args else out
        self._marking.derive(operator, result, kwargs, derived, parties)
        if derived.selected and (random is None or not random.changed()):
            constants = [*parties.loose, *(t for t, _ in parties.coloured)]
            self.repeats.note(operator, func, args, kwargs, out, parties.owned, constants)
        return out


def _lasting(states: Any) -> bool:
    """Whether states hold for every call with the same key: no reasons, no tensors in them."""
    each = states if isinstance(states, list) else [states]
    return all(
        state is None
        or (isinstance(state, Layout) and state.ids is None and state.coupled is None)
        or (isinstance(state, Additive) and state.coupled is None)
        for state in each
    )
