"""The recorder: sees every torch call while its block is open."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

from ..backward.collector import Collector
from ..backward.consumers.consumer import Consumer, Kept
from ..backward.consumers.lean import Lean
from ..backward.passes import Passes
from ..distributed import find_processes
from ..errors import UsageError
from ..guards.guards import Guards
from ..inputs.inputs import Inputs
from ..layouts import Additive, Layout, Mixed, Operator, find
from ..modes import above, below
from ..uses import Context, Derived, Options, Parameters, Params, modules_of, unseen
from .dispatch import Dispatch
from .follower import MISSED
from .hidden_code import as_before, as_written
from .lookup import Lookup
from .tensor_subclasses import overridden, override
from .user_code.custom_functions import CustomFunctions

# every open recording and the ids of its modules, which it keeps alive
_LOCK = threading.RLock()  # a collected recording may be released inside
_OPEN: list[tuple[weakref.ref[Recording], set[int]]] = []


# functions that only look at a tensor's attributes (its shape, dtype or device), and Python
# functions that are run with the recorder watching their bodies
_LOOKS: set[Any] = set()
_ENTERED: set[Any] = set()

Intercept = Callable[[Operator, Any, Sequence[Any], dict[str, Any]], Any]


class Mode(TorchFunctionMode):
    """Receives every torch call; ``calls`` decides what it is, after ``intercept`` had a look."""

    def __init__(self, context: Context, guards: Guards, calls: Dispatch, lookup: Lookup) -> None:
        super().__init__()
        self._calls, self._follow = calls, calls.follow
        self.intercept: Intercept | None = None
        self._context, self._numbers, self._lookup = context, guards.numbers, lookup

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS and not (types and overridden(types)):
            return func(*args, **(kwargs or {}))
        if self.intercept is None:
            if func in _ENTERED and not (types and overridden(types)):
                if func not in self._calls.entering:
                    return self._calls.enter(func, args, kwargs or {})
            found = self._follow(func, types, args, kwargs)
            if found is not MISSED:
                return found
        if types and overridden(types) and torch._C._is_torch_function_enabled():
            seen = self._lookup.overriding
            return override(self._context, seen, func, types, args, kwargs or {})
        operator = find(func)
        if self.intercept is not None and not operator.ignore:
            found = self.intercept(operator, func, args, kwargs or {})
            if found is not NotImplemented:
                return found
        if operator.takes:
            self._numbers.note(operator.name, args)
        if operator.ignore:
            if not operator.takes:
                _LOOKS.add(func)
            return func(*args, **(kwargs or {}))
        if operator.enter and not (operator.direct or operator.graph or operator.takes):
            _ENTERED.add(func)
        return self._calls.handle(operator, func, args, kwargs or {})


class Recording:
    """Everything that takes part in one recording, wired together."""

    def __init__(
        self, model: nn.Module, options: Options, *, params: Params, n: int | None,
        constants: Sequence[str | int | Tensor], sample_ids: Tensor | None,
    ) -> None:  # fmt: skip
        modules = modules_of(model)
        parameters = Parameters(model, params, modules, all_grads=options.grad)
        self.modules = modules.modules
        self.context = context = Context(options, parameters, find_processes(model), n)
        self.guards = guards = Guards(context)
        self.inputs = Inputs(context, constants=constants, sample_ids=sample_ids)
        consumer: Consumer = Kept()
        if options.ahead is not None:
            consumer = Lean(options.ahead, options.budget, options.grad)
        self.collector = context.receiver = Collector(context, guards, consumer)
        self.passes = Passes(context, self.inputs, self.collector, guards)
        self._custom = CustomFunctions(context, guards.numbers)
        context.look = lookup = Lookup(context, self._custom, guards.numbers, self.modules)
        self._calls = Dispatch(context, guards, self.passes, self._custom)
        self.mode = context.mode = Mode(context, guards, self._calls, lookup)
        self._entered = False

    def intercept(self, function: Intercept) -> None:
        """Let a function answer calls first; NotImplemented leaves them to the recorder."""
        self.mode.intercept = function

    def watches(self) -> bool:
        """Whether it sees the calls of this thread, and follows them forward."""
        context = self.context
        if context.options.native or context.backward.busy or not torch.is_grad_enabled():
            return False
        return any(mode is self.mode for mode in _get_current_function_mode_stack())

    def follows(self, tensor: Tensor) -> bool:
        """Whether a tensor holds samples, or is made of parameters."""
        with torch._C.DisableTorchFunction():
            return isinstance(self.context.look(tensor), (Layout, Additive, Mixed, Derived))

    def lose(self, tensor: Tensor, why: str) -> None:
        """A tensor was computed from samples where nothing could be seen."""
        with torch._C.DisableTorchFunction():
            self.context.states.put(tensor, unseen(why))

    # ------------------------------------------------------------------ life

    def open(self) -> None:
        """Begin to see every torch call."""
        if self._entered:
            raise UsageError("a recorder can be entered once", fix="call persample.record again")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UsageError(
                "persample.record cannot run inside a torch.func transform or a compiled function",
                why="these replace the tensors that the recorder follows",
                fix="record outside the transform",
            )
        processes, parameters = self.context.processes, self.context.parameters
        if processes is not None:
            processes.check(parameters.selected.values(), loop=self.context.options.loop)
            parameters.homes = list(processes.homes().values())
        self._claim(set(map(id, self.modules)))
        self._entered = True
        try:
            as_written(self)
            self.inputs.install(self.modules)
            modes = below(self.mode)
            self.mode.__enter__()
            above(modes)
        except BaseException:
            self._leave()
            raise

    def _claim(self, modules: set[int]) -> None:
        """Refuse a model that is being recorded already."""
        with _LOCK:  # recordings of several threads
            _OPEN[:] = [(owner, ids) for owner, ids in _OPEN if owner() is not None]
            if any(not modules.isdisjoint(ids) for _, ids in _OPEN):
                raise UsageError(
                    "this model is being recorded already",
                    fix="leave the first block, or record the parts separately",
                )
            _OPEN.append((weakref.ref(self), modules))

    def close(self, kind: Any, value: Any, trace: Any) -> None:
        """Stop seeing torch calls."""
        try:
            others = []
            while _get_current_function_mode_stack()[-1] is not self.mode:
                others.append(_pop_mode())  # open around the block, or left open inside it
            self.mode.__exit__(kind, value, trace)
            above(others)
        finally:
            self._leave()

    def _leave(self) -> None:
        as_before(self)
        self.inputs.remove()
        with _LOCK:
            _OPEN[:] = [(owner, ids) for owner, ids in _OPEN if owner() not in (None, self)]

    def release(self) -> None:
        """Forget every tensor."""
        self._custom.clear()
        self.context.release()
        self.guards.clear()
        self._calls.clear()
        self.collector.consumer.clear()
