"""The recorder: sees every torch call, follows the samples, taps every use of a parameter."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from .backward import ENGINE, run_backward, run_grad
from .custom import CustomFunctions
from .enter import entered
from .errors import Reason, StaleError, UsageError, here
from .inputs import Inputs
from .layout import CONSTANT, Constant, Layout, Mixed, State, closed
from .layout import explicit as explicit_layout
from .marks import Derived, Mark, Marks, gained_history, version
from .propagate import Operator, collect, find, propagate
from .tap import Tap
from .tape import Params, Tape
from .use import Operand, RandomState, Use, current_autocast

# Operators whose results may share memory with an argument.
_ALIASING = frozenset(
    """view reshape flatten unflatten ravel view_as reshape_as permute transpose swapaxes swapdims
    t T H mT mH adjoint movedim moveaxis unsqueeze squeeze expand expand_as broadcast_to select
    narrow unbind chunk split split_with_sizes tensor_split hsplit vsplit dsplit diagonal unfold
    getitem to type float double half bfloat16 contiguous detach alias data real imag conj
    view_as_real view_as_complex resolve_conj resolve_neg positive as_tensor linalg_diagonal
    type_as slice""".split()
)
# Operators that look only at shape or dtype of all arguments but the first.
_SHAPE_ONLY = frozenset(
    "expand_as view_as reshape_as type_as to zeros_like ones_like empty_like full_like".split()
)
# Results not kept by the operator's own backward: the tap may go on them without a copy.
_FRESH = frozenset(
    """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm group_norm
    batch_norm rms_norm mul multiply add sub rsub matmul mm bmm addmm baddbmm linear einsum cat
    embedding stack div where""".split()
)

_OPEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Mode(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
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
    ) -> None:
        self.model, self.n, self.verify = model, n, verify
        self.loop = unproven == "loop"
        self.native = verify or self.loop
        self.inputs = Inputs(self, dim=dim, constants=constants, sample_ids=sample_ids)
        self.rules = {find(f).name: rule for f, rule in (rules or {}).items()}
        self.marks = Marks()
        self.custom = CustomFunctions(self)
        self.mode = _Mode(self)
        self.anchor = torch.zeros((), requires_grad=True)
        self.slots: dict[int, tuple[str, Tensor]] = {}
        self.selected: dict[str, Tensor] = {}
        self._find_parameters(params)
        self.tape = Tape(self)
        self.entered = False

    def _find_parameters(self, params: Params) -> None:
        names = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                names[name] = parameter
        if callable(params):
            chosen = {name for name in names if params(name)}
        elif params is None:
            chosen = set(names)
        else:
            chosen = {params} if isinstance(params, str) else set(params)
            unknown = chosen - set(names)
            if unknown:
                raise UsageError(
                    f"no trainable parameter is called {sorted(unknown)[0]!r}",
                    fix="use names of model.named_parameters(); frozen parameters have no gradient",
                )
        if not chosen:
            raise UsageError(
                "the model has no trainable parameter to record",
                fix="set requires_grad on the parameters you want gradients of",
            )
        for name, parameter in names.items():
            self.slots[id(parameter)] = (name if name in chosen else "", parameter)
            if name in chosen:
                self.selected[name] = parameter

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
        if any(module in _OPEN for module in self.model.modules()):
            raise UsageError(
                "this model is being recorded already",
                fix="leave the first block, or record the parts separately",
            )
        self.entered = True
        _OPEN.update(self.model.modules())
        try:
            self.inputs.install(self.model)
            self.mode.__enter__()
        except BaseException:
            self._leave()
            raise
        return self.tape

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        try:
            self.mode.__exit__(kind, value, trace)
        finally:
            self._leave()

    def _leave(self) -> None:
        self.inputs.remove()
        for module in self.model.modules():
            _OPEN.discard(module)

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """The mode, switched on if it is not (after the block, or while it handles a call)."""
        if self.mode in _get_current_function_mode_stack():
            return contextlib.nullcontext()
        return self.mode

    def release(self) -> None:
        """Forget every tensor."""
        self.marks.table.clear()
        self.custom.clear()

    # ------------------------------------------------------------------ marking

    def mark(self, tensor: Tensor, *, dim: int = 0, ids: Tensor | None = None) -> None:
        """The user (or a call of the model) says where the samples are."""
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise UsageError("mark takes a tensor with at least one axis")
        if not -tensor.dim() <= dim < tensor.dim():
            raise UsageError(f"no axis {dim} in a tensor of shape {tuple(tensor.shape)}")
        axis = dim % tensor.dim()
        size = tensor.shape[axis]
        if ids is not None:
            if self.n is None:
                raise UsageError("ids need the number of samples", fix="record(model, n=...)")
            if ids.shape != (size,):
                raise UsageError(f"ids must have shape ({size},), got {tuple(ids.shape)}")
            if size and not (-1 <= int(ids.min()) and int(ids.max()) < self.n):
                raise UsageError(f"ids must lie between -1 and {self.n - 1}")
            view = [1] * tensor.dim()
            view[axis] = size
            colours = ids.to(tensor.device, torch.long).view(view)
            self.marks.put(tensor, explicit_layout(colours, self.n))
            return
        if self.n is None:
            self.n = size
        if size != self.n:
            raise UsageError(
                f"axis {axis} of a tensor {tuple(tensor.shape)} does not hold {self.n} samples",
                fix="several forwards in one recording must have the same samples; "
                "give ids= for rows that are not one per sample",
            )
        self.marks.put(tensor, closed(axis))

    # ------------------------------------------------------------------ one call

    def handle(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Any call that is not a mere look at an attribute."""
        if func in ENGINE:
            return self._engine(func, args, kwargs)
        if operator.enter:
            with self.mode:
                return entered(func)(*args, **kwargs)
        tensors: list[Tensor] = []
        collect(args, tensors)
        if kwargs:
            collect(kwargs, tensors)
        if operator.name in _SHAPE_ONLY:
            del tensors[1:]
        coloured: list[tuple[Tensor, State]] = []
        owned: list[Tensor] = []
        for tensor in tensors:
            state = self.look(tensor)
            if state is None:
                continue
            if isinstance(state, Derived):
                owned.append(tensor)
            else:
                coloured.append((tensor, state))
        if not owned:
            if not coloured:
                return func(*args, **kwargs)
            return self._data(operator, func, args, kwargs, coloured)
        data = [pair for pair in coloured if not isinstance(pair[1], Constant)]
        if not data:
            return self._parameters(operator, func, args, kwargs, owned)
        if not torch.is_grad_enabled():
            return self._data(operator, func, args, kwargs, coloured)
        return self._meet(operator, func, args, kwargs, coloured, owned)

    def look(self, tensor: Tensor) -> State | Derived | None:
        """What is known of a tensor; None for a constant."""
        mark = self.marks.get(tensor)
        if mark is not None:
            if not mark.history and gained_history(mark, tensor):
                self.custom.adopt(tensor, mark)
            return mark.state
        if not tensor.requires_grad:
            return None
        return self._unknown(tensor)

    def _unknown(self, tensor: Tensor) -> State | Derived | None:
        """A tensor with a gradient that no recorded operator made."""
        slot = self.slots.get(id(tensor))
        if slot is None:
            slot = self._slot_of(tensor)
        if slot is not None:
            return Derived(bool(slot[0]))
        if tensor.is_leaf:
            self.marks.put(tensor, CONSTANT)
            return CONSTANT
        passed = self.custom.passed_through(tensor)
        if passed is not None:
            return passed
        state = Mixed(
            Reason(
                "an unseen operator",
                f"a tensor with a gradient history ({tensor.grad_fn.name() if tensor.grad_fn else ''}) "
                "was made where the recorder could not see it",
                (tuple(tensor.shape),),
                here(),
                'compute it inside the block, or record(..., unproven="loop")',
            )
        )
        self.marks.put(tensor, state)
        return state

    def _slot_of(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """The parameter slot that holds this tensor now (functional_call, FSDP2)."""
        for prefix, module in self.model.named_modules():
            for key, value in module._parameters.items():
                if value is tensor:
                    name = f"{prefix}.{key}" if prefix else key
                    known = name in self.selected
                    self.slots[id(tensor)] = (name if known else "", tensor)
                    if known:
                        self.selected[name] = tensor
                    return self.slots[id(tensor)]
        return None

    # ------------------------------------------------------------------ the three kinds of call

    def _data(
        self,
        operator: Operator,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        coloured: list[tuple[Tensor, State]],
    ) -> Any:
        """No parameter is involved (or no gradient is wanted): run, then follow the samples."""
        out = func(*args, **kwargs)
        result = args[0] if operator.inplace and args else out
        states = propagate(
            operator, func, tuple(args), kwargs, result, coloured, self.n or 0
        )
        self._store(operator, result, states, coloured)
        return out

    def _store(
        self, operator: Operator, out: Any, states: Any, coloured: list[tuple[Tensor, State]]
    ) -> None:
        outs: list[Tensor] = []
        collect(out, outs)
        each = states if isinstance(states, list) else [states] * len(outs)
        for tensor, state in zip(outs, each, strict=False):
            if state is None and tensor.requires_grad:
                state = CONSTANT if not tensor.is_leaf else None
            if operator.inplace:
                self._rewrite(tensor, state)
            elif state is not None:
                like = self._memory(operator, tensor, coloured)
                self.marks.put(tensor, state, like)

    def _rewrite(self, tensor: Tensor, state: State | None) -> None:
        known = self.marks.table.get(id(tensor))
        before = known.state if known is not None else None
        if state is None:
            if known is None:
                return
            state = CONSTANT
        self.marks.rewrite(tensor, state, changed=not _same(before, state))

    def _memory(
        self, operator: Operator, out: Tensor, coloured: list[tuple[Tensor, State]]
    ) -> Mark | None:
        if operator.name not in _ALIASING:
            return None
        base = out._base
        if base is not None:
            return self.marks.table.get(id(base))
        if operator.name == "detach":
            return self.marks.table.get(id(coloured[0][0]))
        return None

    def _parameters(
        self,
        operator: Operator,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        owned: list[Tensor],
    ) -> Any:
        """Parameters and constants only: the result is derived from parameters."""
        selected = any(self._is_selected(t) for t in owned)
        out = func(*args, **kwargs)
        result = args[0] if operator.inplace and args else out
        outs: list[Tensor] = []
        collect(result, outs)
        for tensor in outs:
            if tensor.requires_grad and id(tensor) not in self.slots:
                if operator.inplace:
                    self.marks.rewrite(tensor, Derived(selected), changed=True)
                else:
                    like = self._memory(operator, tensor, [(owned[0], CONSTANT)])
                    self.marks.put(tensor, Derived(selected), like)
        return out

    def _is_selected(self, tensor: Tensor) -> bool:
        state = self.look(tensor)
        return isinstance(state, Derived) and state.selected

    def _meet(
        self,
        operator: Operator,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        coloured: list[tuple[Tensor, State]],
        owned: list[Tensor],
    ) -> Any:
        """A parameter meets data: one use."""
        bad = self._not_per_sample(operator, coloured)
        if bad is not None:
            out = func(*args, **kwargs)
            self._store(operator, args[0] if operator.inplace else out, bad, coloured)
            return out
        leaves, spec = tree_flatten((tuple(args), kwargs))
        operands = self._operands(leaves, {id(t) for t in owned})
        keep = {o.position for o in operands}
        data = [k for k, v in enumerate(leaves) if isinstance(v, Tensor) and k not in keep]
        run = list(leaves)
        if not self.native:
            for operand in operands:
                run[operand.position] = operand.value
        target = leaves[0] if operator.inplace else None
        if target is not None:
            run[0] = run[0].clone()
            saved = [target.detach().clone() if k == 0 else leaves[k] for k in data]
        else:
            saved = [leaves[k] for k in data]
        random = RandomState(owned[0].device) if _may_draw(operator) else None
        call_args, call_kwargs = tree_unflatten(run, spec)
        out = func(*call_args, **call_kwargs)
        result = call_args[0] if operator.inplace else out
        pairs = _renamed(coloured, target, run[0] if target is not None else None)
        states = propagate(
            operator, func, call_args, call_kwargs, result, pairs, self.n or 0
        )
        use = Use(
            tape=weakref.ref(self.tape),
            operator=operator.name,
            func=func,
            spec=spec,
            leaves=[None if isinstance(v, Tensor) else v for v in leaves],
            operands=[o for o in operands],
            data=data,
            layouts=[_layout(self.look(leaves[k])) for k in data],
            results=[],
            out_layouts=[],
            out_shapes=[],
            place=here(),
            inplace=operator.inplace,
            rng=random if random is not None and random.changed() else None,
            autocast=current_autocast({owned[0].device.type}),
        )
        tapped = self._tap(operator, use, result, states, saved)
        if target is None:
            return tapped
        self._write_back(target, tapped)
        return target

    def _operands(self, leaves: list[Any], owned: set[int]) -> list[Operand]:
        operands = []
        for position, value in enumerate(leaves):
            if isinstance(value, Tensor) and id(value) in owned:
                slot = self.slots.get(id(value))
                name = slot[0] or None if slot is not None else None
                edge = None
                if slot is None and self._is_selected(value):
                    edge = torch.autograd.graph.get_gradient_edge(value)
                operands.append(Operand(position, value.detach(), name, edge, version(value)))
        return operands

    def _tap(
        self, operator: Operator, use: Use, result: Any, states: Any, saved: list[Tensor]
    ) -> Any:
        outs: list[Tensor] = []
        collect(result, outs)
        each = list(states) if isinstance(states, list) else [states] * len(outs)
        for k, (out, state) in enumerate(zip(outs, each, strict=False)):
            if isinstance(state, Layout) and (out.is_floating_point() or out.is_complex()):
                use.results.append(k)
                use.out_layouts.append(state)
                use.out_shapes.append(out.shape)
        wanted = [o for o in use.operands if o.name or o.edge is not None]
        if use.results and wanted:
            dirty = operator.name in _FRESH and len(outs) == 1 and outs[0]._base is None
            picked = [outs[k] for k in use.results]
            new = Tap.apply(self.anchor, use, len(saved), dirty, *saved, *picked)
            for k, tensor in zip(use.results, (new,) if len(picked) == 1 else new, strict=True):
                outs[k] = tensor
        for tensor, state in zip(outs, each, strict=False):
            if state is None and tensor.requires_grad:
                state = CONSTANT
            if state is not None:
                self.marks.put(tensor, _refused_sum(operator, state, outs))
        if isinstance(result, Tensor):
            return outs[0]
        rebuilt = _rebuild(result, iter(outs))
        return rebuilt

    def _write_back(self, target: Tensor, value: Tensor) -> None:
        """Give an in-place operator's target its new value and history."""
        state = self.look(value)
        if isinstance(self.look(target), Derived) and target.grad_fn is not None:
            target.detach_()  # its old history leads to parameters and must not be followed again
        target.copy_(value)
        known = self.marks.table.get(id(target))
        before = known.state if known is not None else None
        if isinstance(state, (Derived, type(None))):
            state = CONSTANT
        self.marks.rewrite(target, state, changed=not _same(before, state))

    def _not_per_sample(
        self, operator: Operator, coloured: list[tuple[Tensor, State]]
    ) -> Mixed | None:
        for tensor, state in coloured:
            if isinstance(state, (Constant, Derived)):
                continue
            if isinstance(state, Layout):
                if state.coupled is None:
                    continue
                return Mixed(state.coupled)
            if operator.routes and not tensor.is_floating_point() and not tensor.requires_grad:
                continue
            if isinstance(state, Mixed):
                return state
            return Mixed(
                Reason(
                    operator.name,
                    "parameters meet a sum over samples (a regulariser on parameters alone?)",
                    (tuple(tensor.shape),),
                    here(),
                    "give the regulariser its own backward() after tape.set_grad(...)",
                )
            )
        return None

    # ------------------------------------------------------------------ backward

    def _engine(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``loss.backward()`` and ``torch.autograd.grad`` inside the block."""
        if self.tape._receiving or self.tape._muted:  # checkpointing back-propagates inside backward
            with self.mode:
                return entered(func)(*args, **kwargs)
        if func is torch.autograd.grad:
            return run_grad(self, args, kwargs)
        run_backward(self, func, args, kwargs)
        return None

    def backward(
        self, losses: Tensor, *, scale: float | Tensor | None, retain_graph: bool
    ) -> None:
        """:meth:`Tape.backward`."""
        from .backward import tape_backward

        tape_backward(self, losses, scale=scale, retain_graph=retain_graph)

    # ------------------------------------------------------------------ queries

    def concerns(self, use: Use, names: Sequence[str]) -> bool:
        """Whether a use can contribute to any of these parameters."""
        return any(o.name in names or o.name is None for o in use.operands)

    def check_versions(self, uses: list[Use]) -> None:
        """Refuse to answer from parameters that have changed."""
        for use in uses:
            for operand in use.operands:
                if operand.name is not None and version(operand.value) != operand.version:
                    raise StaleError(
                        f"the parameter {operand.name!r} was modified after it was recorded",
                        fix="ask the tape before optimizer.step()",
                    )


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if isinstance(before, Layout) and isinstance(after, Layout):
        if before.ids is None and after.ids is None:
            return before.axis == after.axis and before.inner == after.inner
        return before.ids is after.ids
    return False


def _layout(state: Any) -> Layout | None:
    return state if isinstance(state, Layout) else None


def _renamed(
    coloured: list[tuple[Tensor, State]], old: Tensor | None, new: Any
) -> list[tuple[Tensor, State]]:
    """An in-place operator ran on a copy of its target: the copy has the target's state."""
    return [(new if t is old else t, s) for t, s in coloured]


def _rebuild(template: Any, items: Any) -> Any:
    if isinstance(template, Tensor):
        return next(items)
    if isinstance(template, (list, tuple)):
        made = [_rebuild(v, items) for v in template]
        if hasattr(template, "_fields"):
            return type(template)(*made)
        if type(template) in (list, tuple):
            return type(template)(made)
        return type(template)(made)
    return template


def _may_draw(operator: Operator) -> bool:
    return operator.name in _RANDOM


_RANDOM = frozenset(
    """dropout alpha_dropout feature_dropout feature_alpha_dropout rrelu bernoulli normal poisson
    binomial scaled_dot_product_attention lstm gru rnn_tanh rnn_relu fractional_max_pool2d
    fractional_max_pool3d native_dropout multinomial""".split()
)


def _refused_sum(operator: Operator, state: State, outs: list[Tensor]) -> State:
    if isinstance(state, (Layout, Mixed, Constant)):
        return state
    return Mixed(
        Reason(
            operator.name,
            "a parameter meets data in an operator that sums over samples at once",
            tuple(tuple(o.shape) for o in outs),
            here(),
            'keep the samples apart first (reduction="none", or multiply and then sum)',
        )
    )


def record(
    model: nn.Module,
    *,
    n: int | None = None,
    dim: int = 0,
    constants: Iterable[str | int | Tensor] = (),
    sample_ids: Tensor | None = None,
    params: Params = None,
    rules: dict[Any, Callable[..., Any]] | None = None,
    unproven: str = "refuse",
    verify: bool = False,
) -> Recorder:
    """Record one ordinary forward and backward of an unmodified model.

    >>> import torch, persample
    >>> model = torch.nn.Linear(3, 1)
    >>> with persample.record(model) as tape:
    ...     losses = model(torch.ones(2, 3)).square().squeeze(1)
    ...     tape.backward(losses)
    >>> tape.grads()["weight"].shape
    torch.Size([2, 1, 3])

    ``n``: number of samples (else the first input tells). ``dim``: the axis of the samples in the
    model's inputs. ``constants``: inputs that hold no samples although a size matches, by name,
    position or tensor. ``sample_ids``: the sample of every input row (needs ``n``). ``params``:
    names, or a predicate on names. ``rules``: overrides for one recording. ``unproven``: "refuse",
    or "loop" to fall back to one backward pass per sample. ``verify``: check this step against
    autograd.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"record takes an nn.Module, got {type(model).__name__}")
    if unproven not in ("refuse", "loop"):
        raise UsageError(f"unproven must be 'refuse' or 'loop', got {unproven!r}")
    if n is not None and (not isinstance(n, int) or n < 0):
        raise UsageError(f"n must be a non-negative integer, got {n!r}")
    if sample_ids is not None and n is None:
        raise UsageError("sample_ids needs n, the number of samples", fix="record(model, n=...)")
    return Recorder(
        model, n=n, dim=dim, constants=constants, sample_ids=sample_ids, params=params,
        rules=rules, unproven=unproven, verify=verify,
    )
