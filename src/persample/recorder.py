"""The recorder: sees every torch call, follows the samples, taps every use of a parameter."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from .backward import ENGINE, run_backward, run_grad, tape_backward, weighted_backward
from .custom import CustomFunctions, graph_node
from .distributed import spread
from .enter import entered
from .errors import Reason, UsageError, here
from .inputs import Inputs
from .layout import CONSTANT, Constant, Mixed, State
from .marks import EXCLUDED, SELECTED, Derived, Mark, Marks, gained_history, same
from .meeting import meet, not_per_sample
from .parameters import Parameters, Params
from .propagate import Operator, collect, find, propagate
from .tape import Tape

Coloured = list[tuple[Tensor, State]]

# Operators whose results may share memory with an argument.
_ALIASING = frozenset(
    """view reshape flatten unflatten ravel view_as reshape_as permute transpose swapaxes swapdims t
    T H mT mH adjoint movedim moveaxis unsqueeze squeeze expand expand_as broadcast_to select
    narrow unbind chunk split split_with_sizes tensor_split hsplit vsplit dsplit diagonal unfold
    getitem to type float double half bfloat16 contiguous detach alias data real imag conj
    view_as_real view_as_complex resolve_conj resolve_neg positive as_tensor linalg_diagonal
    type_as slice as_strided broadcast_tensors atleast_1d atleast_2d atleast_3d meshgrid""".split()
)
# Operators that look only at shape or dtype of all arguments but the first.
_SHAPE_ONLY = frozenset(
    [
        "expand_as",
        "view_as",
        "reshape_as",
        "type_as",
        "to",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
    ]
)
_OPEN: list[set[int]] = []  # ids of the modules of every open recording


class _Mode(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = find(func)
        if operator.ignore:
            return func(*args, **(kwargs or {}))
        return self.recorder.handle(operator, func, args, kwargs or {})


class Recorder:
    """Context manager around one ordinary forward (and backward) of a model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        n: int | None,
        dim: int,
        constants: Iterable[str | int | Tensor],
        sample_ids: Tensor | None,
        params: Params,
        rules: dict[Any, Callable[..., Any]] | None,
        unproven: str,
        verify: bool,
        lean: bool,
    ) -> None:
        self.marks = Marks()
        self.model, self.n, self.verify, self.lean = model, n, verify, lean
        self.loop = unproven == "loop"
        self.native = verify or self.loop
        self.parameters = Parameters(model, params)
        self.spread = spread(model)
        self.inputs = Inputs(self, dim=dim, constants=constants, sample_ids=sample_ids)
        self.rules = {find(f).name: rule for f, rule in (rules or {}).items()}
        self.custom = CustomFunctions(self)
        self.mode = _Mode(self)
        self.anchor = torch.zeros((), requires_grad=True)
        self._tape: Tape | None = Tape(self)
        self._tape_ref = weakref.ref(self._tape)
        weakref.finalize(self._tape, self.release)
        self._modules: set[int] = set()
        self.entering: list[Any] = []
        self._eager = contextlib.ExitStack()
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
                "persample.record cannot run inside a torch.func transform",
                why="grad, vmap and jvp replace the tensors that the recorder follows",
                fix="record outside the transform",
            )
        modules = {id(module) for module in self.model.modules()}
        if any(not modules.isdisjoint(other) for other in _OPEN):
            raise UsageError(
                "this model is being recorded already",
                fix="leave the first block, or record the parts separately",
            )
        if self.spread is not None:
            self.spread.check(self.parameters.selected.values(), loop=self.loop)
            self.parameters.homes = list(self.spread.homes().values())
        self.entered = True
        self._modules = modules
        _OPEN.append(modules)
        try:
            self._run_eagerly()
            self.inputs.install(self.model)
            self.mode.__enter__()
        except BaseException:
            self._leave()
            raise
        return self.tape

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        try:
            others = []
            while _get_current_function_mode_stack()[-1] is not self.mode:
                others.append(torch.overrides._pop_mode())  # left open inside the block
            self.mode.__exit__(kind, value, trace)
            for other in reversed(others):
                torch.overrides._push_mode(other)
        finally:
            self._leave()

    @property
    def tape(self) -> Tape:
        """The tape; after the block it lives only as long as its user holds it."""
        tape = self._tape_ref()
        assert tape is not None
        return tape

    def _run_eagerly(self) -> None:
        """Compiled code runs as it was written: inside a compiled graph nothing can be seen.

        The stance is process-wide and its first use imports the compiler, so it is taken only
        where the compiler has been imported already.
        """
        if "torch._dynamo" in sys.modules:
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))

    def _leave(self) -> None:
        self._tape = None
        self._eager.close()
        self.inputs.remove()
        _OPEN[:] = [other for other in _OPEN if other is not self._modules]

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """The mode, switched on if it is not (after the block, or while it handles a call)."""
        if self.mode in _get_current_function_mode_stack():
            return contextlib.nullcontext()
        return self.mode

    def release(self) -> None:
        """Forget every tensor."""
        self.marks.table.clear()
        self.custom.clear()

    # ------------------------------------------------------------------ one call

    def handle(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Any call that is not a mere look at an attribute."""
        if func in ENGINE:
            return self._engine(func, args, kwargs)
        if operator.name == "grad_fn":
            return graph_node(func(*args))
        if func is Tensor.register_hook:
            self._leaves_its_module(args[0])
            hook = self.custom.guarded(args[0], *args[1:], **kwargs)
            return func(args[0], hook)  # type: ignore[no-untyped-call]
        if operator.enter and func not in self.entering:
            return self._enter(func, args, kwargs)
        tensors: list[Tensor] = []
        collect(args, tensors)
        if kwargs:
            collect(kwargs, tensors)
        if operator.name in _SHAPE_ONLY:
            del tensors[1:]
        coloured: Coloured = []
        owned: list[Tensor] = []
        data = False
        for tensor in tensors:
            state = self.look(tensor)
            if state is None:
                continue
            if isinstance(state, Derived):
                owned.append(tensor)
            else:
                coloured.append((tensor, state))
                data = data or not isinstance(state, Constant)
        if coloured:
            if torch.is_grad_enabled():
                self.custom.forget()
            else:
                self.custom.read(coloured)
        if not owned:
            if not coloured:
                return func(*args, **kwargs)
            return self._data(operator, func, args, kwargs, coloured)
        if not data:
            return self._derive(operator, func, args, kwargs, owned)
        if not torch.is_grad_enabled():
            return self._data(operator, func, args, kwargs, coloured)
        bad = not_per_sample(operator, coloured)
        if bad is not None:
            out = func(*args, **kwargs)
            self._store(operator, args[0] if operator.inplace else out, bad, coloured)
            return out
        return meet(self, operator, func, args, kwargs, coloured, owned)

    def _leaves_its_module(self, tensor: Tensor) -> None:
        """fully_shard hooks what its modules return; a tensor derived from parameters is lost."""
        sharded = self.spread is not None and self.spread.sharded
        if sharded and isinstance(self.look(tensor), Derived):
            why = "it is derived from parameters whose memory is freed when their module returns"
            fix = "compute it where it is used, or shard both modules as one group"
            reason = Reason("fully_shard", why, (tuple(tensor.shape),), here(), fix)
            self.marks.put(tensor, Mixed(reason))

    def _enter(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a Python function of torch with the recorder watching its body.

        A C function may report itself under the name of the Python function that calls it; met
        again inside, the name means the C function.
        """
        self.entering.append(func)
        try:
            with self.mode:
                return entered(func)(*args, **kwargs)
        finally:
            self.entering.pop()

    def _engine(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``loss.backward()`` and ``torch.autograd.grad`` inside the block."""
        if self.busy:  # checkpointing back-propagates inside backward
            with self.mode:
                return entered(func)(*args, **kwargs)
        if func is torch.autograd.grad:
            return run_grad(self, args, kwargs)
        run_backward(self, func, args, kwargs)
        return None

    def backward(self, losses: Tensor, *, scale: float | Tensor | None, retain_graph: bool) -> None:
        """The body of ``Tape.backward``."""
        tape_backward(self, losses, scale=scale, retain_graph=retain_graph)

    def weighted_backward(self, c: Tensor, bad: Tensor | None) -> dict[str, Tensor]:
        """Σ cᵢ gᵢ of a lean recording."""
        return weighted_backward(self, c, bad)

    # ------------------------------------------------------------------ what is known of a tensor

    def look(self, tensor: Tensor) -> State | Derived | None:
        """What is known of a tensor; None for a constant."""
        mark = self.marks.get(tensor)
        if mark is not None:
            if not mark.history and gained_history(mark, tensor):
                self.custom.adopt(tensor, mark)
            return mark.state
        slot = self.parameters.slots.get(id(tensor))
        if slot is not None:
            return SELECTED if slot.name is not None else EXCLUDED
        if self.busy and torch.is_grad_enabled():  # a recomputation: its inputs may be copies
            twin = self.marks.twin(tensor)
            if twin is not None:
                return twin
        if not tensor.requires_grad:
            return None
        return self._unknown(tensor)

    def is_selected(self, tensor: Tensor) -> bool:
        """Whether a tensor is, or is derived from, a recorded parameter."""
        state = self.look(tensor)
        return isinstance(state, Derived) and state.selected

    def _unknown(self, tensor: Tensor) -> State | Derived | None:
        """A tensor with a gradient that no recorded operator made."""
        slot = self.parameters.find(tensor)
        if slot is not None:
            return SELECTED if slot.name is not None else EXCLUDED
        if tensor.is_leaf:
            self.marks.put(tensor, CONSTANT)
            return CONSTANT
        passed = self.custom.passed_through(tensor)
        if passed is not None:
            return passed
        node = tensor.grad_fn
        why = (
            f"a tensor with a gradient history ({node.name() if node else 'unknown'}) was made "
            "where the recorder could not see it"
        )
        fix = 'compute it inside the block, or record(..., unproven="loop")'
        state = Mixed(Reason("an unseen operator", why, (tuple(tensor.shape),), here(), fix))
        self.marks.put(tensor, state)
        return state

    # ------------------------------------------------------------------ calls without a meeting

    def _data(
        self,
        operator: Operator,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        coloured: Coloured,
    ) -> Any:
        """No parameter is involved, or no gradient is wanted: run, then follow the samples."""
        seen = tuple(args)
        if operator.inplace and operator.name in _ALIASING:  # the shape before the call matters
            before = args[0].detach()
            seen = (before, *args[1:])
            coloured = [(before if t is args[0] else t, s) for t, s in coloured]
        out = func(*args, **kwargs)
        result = args[0] if operator.inplace and args else out
        states = propagate(operator, func, seen, kwargs, result, coloured, self.n or 0)
        self._store(operator, result, states, coloured)
        return out

    def _derive(
        self,
        operator: Operator,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        owned: list[Tensor],
    ) -> Any:
        """Parameters and constants only: the result is derived from parameters."""
        derived = SELECTED if any(self.is_selected(t) for t in owned) else EXCLUDED
        out = func(*args, **kwargs)
        outs: list[Tensor] = []
        collect(args[0] if operator.inplace and args else out, outs)
        for tensor in outs:
            if tensor.requires_grad and id(tensor) not in self.parameters.slots:
                if operator.inplace:
                    self.marks.rewrite(tensor, derived, changed=True)
                else:
                    like = self._memory(operator, tensor, owned[0])
                    self.marks.put(tensor, derived, like)
        return out

    def _store(self, operator: Operator, out: Any, states: Any, coloured: Coloured) -> None:
        """Mark an operator's results."""
        outs: list[Tensor] = []
        collect(out, outs)
        each = states if isinstance(states, list) else [states] * len(outs)
        for tensor, state in zip(outs, each, strict=True):
            if state is None and tensor.requires_grad and not tensor.is_leaf:
                state = CONSTANT
            if operator.inplace:
                self._rewrite(tensor, state)
            elif state is not None:
                self.marks.put(tensor, state, self._memory(operator, tensor, coloured[0][0]))
                if operator.name == "view_as":
                    # torch itself views an argument that a custom function returns as it is, and
                    # gives the view the function's node afterwards: look again
                    self.marks.table[id(tensor)].history = False

    def _rewrite(self, tensor: Tensor, state: State | None) -> None:
        known = self.marks.table.get(id(tensor))
        if known is None and state is None:
            return
        before = known.state if known is not None else None
        self.marks.rewrite(tensor, state or CONSTANT, changed=not same(before, state or CONSTANT))

    def _memory(self, operator: Operator, out: Tensor, source: Tensor) -> Mark | None:
        """The mark of a tensor that shares its memory with a result."""
        if operator.name not in _ALIASING:
            return None
        base = out._base
        if base is not None:
            return self.marks.table.get(id(base))
        return self.marks.table.get(id(source)) if operator.name == "detach" else None
