"""The recorder: sees every torch call, follows the samples, taps every use of a parameter."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

from .backward import revisit, tape_backward
from .calls import Calls
from .custom import CustomFunctions
from .distributed import spread
from .eager import as_before, eagerly
from .enter import above, below
from .errors import Reason, UsageError, here
from .inputs import Inputs
from .layout import CONSTANT, Mixed, State
from .lean import Ahead, Visitor
from .marks import EXCLUDED, SELECTED, Derived, Marks, gained_history, transformed
from .parameters import Parameters, Params, modules_of
from .propagate import find
from .soiled import Soiled
from .subclasses import behind, overridden, override
from .tape import Tape
from .values import Constants
from .walls import Zeros

# every open recording and the ids of its modules, which it keeps alive
_LOCK = threading.RLock()  # a collected recording may be released inside
_OPEN: list[tuple[weakref.ref[Recorder], set[int]]] = []
with torch.inference_mode(False):
    _ANCHOR = torch.zeros((), device="cpu", requires_grad=True)  # gives our nodes a reason to exist


class _Mode(TorchFunctionMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and overridden(types) and torch._C._is_torch_function_enabled():
            return override(self.calls.recorder, func, types, args, kwargs or {})
        operator = find(func)
        if operator.takes and self.calls.recorder.busy:
            self.calls.recorder.custom.taken.note(operator.name, args)
        if operator.ignore:
            return func(*args, **(kwargs or {}))
        return self.calls.handle(operator, func, args, kwargs or {})


def _release(owner: weakref.ref[Recorder]) -> None:
    """A tape is gone: so are the tensors that were followed for it."""
    recorder = owner()
    if recorder is not None:
        recorder.release()


class Recorder:
    """Context manager around one ordinary forward (and backward) of a model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        n: int | None,
        dim: int,
        constants: Sequence[str | int | Tensor],
        sample_ids: Tensor | None,
        params: Params,
        rules: dict[Any, Callable[..., Any]] | None,
        unproven: str,
        verify: bool,
        lean: bool | Ahead,
        positions: bool,
        budget: int,
    ) -> None:
        self.marks = Marks()
        self.model, self.n, self.verify, self.lean = model, n, verify, bool(lean)
        self.ahead = lean if isinstance(lean, Ahead) else Ahead() if lean else None
        self.positions, self.budget = positions, budget
        self.loop = unproven == "loop"
        self.transforming = False  # torch.func ran code that was not followed
        self.by_zeros = Zeros()  # zeros of a constant were all that kept samples apart
        self.second_order = False  # a gradient was taken to be differentiated again
        self.native = verify or self.loop
        self._walked = modules_of(model)
        self.parameters = Parameters(model, params, self._walked)
        self.spread = spread(model)
        self.expects = self.lean or self.spread is not None  # the ledger wants to hear of uses
        self.inputs = Inputs(self, dim=dim, constants=constants, sample_ids=sample_ids)
        self.rules = {find(f).name: rule for f, rule in (rules or {}).items()}
        self.special = self.native or bool(self.rules)  # uses are not what they usually are
        self.constants = Constants()
        self.custom = CustomFunctions(self)
        self.soiled = Soiled(self.marks, self.parameters)
        self.calls = Calls(self)
        self.mode = _Mode(self.calls)
        self.anchor = _ANCHOR
        self._tape: Tape | None = Tape(self)
        self.tape_ref = weakref.ref(self._tape)
        weakref.finalize(self._tape, _release, weakref.ref(self))
        self.overriding: list[Tensor] = []  # what tensors' own code met, while it runs
        self.entered = self.busy = False

    @property
    def n(self) -> int | None:
        """The number of samples, once it is known."""
        return self.marks.n

    @n.setter
    def n(self, value: int | None) -> None:
        self.marks.n = value

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Tape:
        if self.entered:
            raise UsageError("a recorder can be entered once", fix="call persample.record again")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UsageError(
                "persample.record cannot run inside a torch.func transform or a compiled function",
                why="these replace the tensors that the recorder follows",
                fix="record outside the transform",
            )
        found = [module for _, module in self._walked]
        modules = {id(module) for module in found}
        if self.spread is not None:
            self.spread.check(self.parameters.selected.values(), loop=self.loop)
            self.parameters.homes = list(self.spread.homes().values())
        self._open(modules)
        self.entered = True
        try:
            eagerly(self)
            self.inputs.install(found)
            modes = below(self.mode)
            self.mode.__enter__()
            above(modes)
        except BaseException:
            self._leave()
            raise
        return self.tape

    def _open(self, modules: set[int]) -> None:
        with _LOCK:  # recordings of several threads
            _OPEN[:] = [(owner, ids) for owner, ids in _OPEN if owner() is not None]
            if any(not modules.isdisjoint(ids) for _, ids in _OPEN):
                raise UsageError(
                    "this model is being recorded already",
                    fix="leave the first block, or record the parts separately",
                )
            _OPEN.append((weakref.ref(self), modules))

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        try:
            others = []
            while _get_current_function_mode_stack()[-1] is not self.mode:
                others.append(_pop_mode())  # open around the block, or left open inside it
            self.mode.__exit__(kind, value, trace)
            above(others)
        finally:
            self._leave()

    @property
    def tape(self) -> Tape:
        """The tape; after the block it lives only as long as its user holds it."""
        tape = self.tape_ref()
        assert tape is not None
        return tape

    def _leave(self) -> None:
        self._tape = None
        as_before(self)
        self.inputs.remove()
        with _LOCK:
            _OPEN[:] = [(owner, ids) for owner, ids in _OPEN if owner() not in (None, self)]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The mode, switched on if it is not (after the block, or while it handles a call)."""
        if self.mode in _get_current_function_mode_stack():
            yield
            return
        modes = below(self.mode)
        with self.mode:
            above(modes)
            try:
                yield
            finally:
                modes = below(self.mode)
        above(modes)

    def release(self) -> None:
        """Forget every tensor."""
        self.marks.table.clear()
        self.custom.clear()
        self.soiled.clear()
        self.inputs.kept.clear()
        self.inputs.given.clear()
        self.constants.clear()
        self.by_zeros.clear()
        self.calls.repeats.clear()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Whoever forgot ``with`` looks for the tape's questions here."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if hasattr(Tape, name):
                text += "; write: with persample.record(model) as tape:"
            raise AttributeError(text)

    def propagate_back(
        self, losses: Tensor, *, scale: float | Tensor | None, retain_graph: bool
    ) -> None:
        """The body of ``Tape.backward``."""
        tape_backward(self, losses, scale=scale, retain_graph=retain_graph)

    def revisit(self, names: set[str], visit: Visitor, *, linear: bool, last: bool) -> None:
        """Back-propagate a lean recording again and show its gradients to a visitor."""
        revisit(self, names, visit, linear=linear, last=last)

    # ------------------------------------------------------------------ what is known of a tensor

    def look(self, tensor: Tensor) -> State | Derived | None:
        """What is known of a tensor; None for a constant."""
        mark = self.marks.get(tensor)
        if mark is not None:
            if not mark.history and gained_history(mark, tensor):
                self.custom.adopt(tensor, mark)
            return mark.state
        slot = self.parameters.slots.get(id(tensor))
        if slot is not None:  # frozen inside the block: this use is none of the parameter's
            return SELECTED if slot.name is not None and tensor.requires_grad else EXCLUDED
        if self.busy:
            if transformed(tensor):  # what comes out of the transform has no mark
                self.custom.taken.hide("torch.func")
            elif torch.is_grad_enabled() or self.custom.taken.running:
                # a recomputation's inputs, and what hooks give back to a function, may be copies
                twin = self.marks.twin(tensor)
                if twin is not None:
                    return twin
        if self.overriding:
            known = behind(self.marks, tensor, self.overriding)
            if known is not None:
                return known
        if not tensor.requires_grad:
            return self.soiled.known(tensor) if self.soiled.written else None
        return self._unknown(tensor)

    def is_selected(self, tensor: Tensor) -> bool:
        """Whether a tensor is, or is derived from, a recorded parameter."""
        state = self.look(tensor)
        return isinstance(state, Derived) and state.selected

    def _unknown(self, tensor: Tensor) -> State | Derived | None:
        """A tensor with a gradient that no recorded operator made."""
        if tensor.is_leaf and not torch.is_grad_enabled():
            return (
                None  # a parameter that is being initialised, perhaps: look again when it is used
            )
        slot = self.parameters.find(tensor)
        if slot is not None:
            return SELECTED if slot.name is not None else EXCLUDED
        if tensor.is_leaf:
            self.custom.expose(tensor)
            self.parameters.note_foreign(tensor)
            self.marks.put(tensor, CONSTANT)
            return CONSTANT
        known = self.custom.unpacked(tensor) or self.custom.passed_through(tensor)
        if known is not None:
            return known
        if self.parameters.partial and self.custom.of_excluded(tensor.grad_fn):
            self.marks.put(tensor, EXCLUDED)
            return EXCLUDED
        node = tensor.grad_fn
        why = (
            f"a tensor with a gradient history ({node.name() if node else 'unknown'}) was made "
            "where the recorder could not see it"
        )
        fix = 'compute it inside the block, or record(..., unproven="loop")'
        if any(isinstance(module, torch.jit.ScriptModule) for _, module in self._walked):
            why += ": in a scripted or traced module, perhaps"
            fix = 'record the module that was scripted, or record(..., unproven="loop")'
        if self.transforming:
            why += ": inside a torch.func transform (vmap, jvp, grad), perhaps"
            fix = 'write it without torch.func, or record(..., unproven="loop")'
        state = Mixed(Reason("an unseen operator", why, (tuple(tensor.shape),), here(), fix))
        self.marks.put(tensor, state)
        return state
