"""Back-propagation that the user starts with torch's own functions inside the block."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ..autograd_graph import leaves_of
from ..errors import LOOP, MixedSamplesError, PersampleError, Reason, UsageError, called_by, here
from ..guards.native_gradients import note_untrained
from ..layouts import Additive, Constant, Layout, Mixed
from ..modes import entered, watching
from ..uses import Context, Derived, same
from .passes import Passes

_CHECKPOINT = CheckpointFunction.backward.__code__
_CHECKPOINTED = CheckpointFunction.forward.__code__
_grad = entered(torch.autograd.grad)
ENGINE = frozenset((Tensor.backward, torch.autograd.backward, torch.autograd.grad))


def expect_reached(context: Context, owned: Sequence[Tensor]) -> None:
    """Refuse a reentrant checkpoint that no gradient reaches.

    Backward stops where only parameters that ``params=`` leaves out are behind. The checkpoint then
    is not run again, and uses inside it would be missed.
    """
    inputs, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINTED:  # the outermost counts: gradients are off inside
            inputs = frame.f_locals["args"]
        frame = frame.f_back  # type: ignore[assignment]
    if inputs is None or any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        return
    if any(context.is_selected(t) for t in owned):
        raise UsageError(
            "a reentrant checkpoint uses a recorded parameter, and no gradient reaches it",
            why="only parameters that params= leaves out come before it",
            fix="checkpoint(..., use_reentrant=False), or record all parameters",
        )


def run_backward(
    passes: Passes, context: Context, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """A plain ``backward()`` inside the block."""
    given = _given(args, kwargs)
    roots, starts = _roots(given)
    seeds = starts[0] if starts else None
    retain = bool(given.get("retain_graph")) or bool(given.get("create_graph"))
    if given.get("inputs") is not None:
        _add_to_inputs(context, given)
        return
    if len(roots) != 1:
        raise UsageError("several roots in one backward", fix="add them up, or call it for each")
    root = roots[0]
    if seeds is not None:
        before = context.backward.scalar
        context.backward.scalar |= bool((seeds != 1).any())  # rows are weighted gradients
        if not passes.run_plain(root, seeds, retain):
            context.backward.scalar = before
        return
    if root.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    recorded = passes.run_plain(root, torch.ones_like(root), retain)
    if recorded and not context.options.grad:
        note_untrained(context.parameters.selected.values())


def _add_to_inputs(context: Context, given: dict[str, Any]) -> None:
    """``backward(inputs=...)``: ``torch.autograd.grad``, added to ``.grad`` of these tensors."""
    inputs, (roots, seeds) = _listed(given["inputs"]), _roots(given)
    more = {key: given[key] for key in ("retain_graph", "create_graph") if given.get(key)}
    found = run_grad(context, (roots, inputs, seeds or None), {**more, "allow_unused": True})
    for x, grad in zip(inputs, found, strict=True):
        if grad is not None and x.grad is not None:
            with context.mode, torch.set_grad_enabled(bool(given.get("create_graph"))):
                x.grad = x.grad + grad
        elif grad is not None:
            x.grad = grad


def _given(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a backward, method or function, by the function's names."""
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph")
    given = dict(zip(names, args, strict=False)) | kwargs
    for own, other in (("self", "tensors"), ("gradient", "grad_tensors")):
        if own in given:
            given[other] = given.pop(own)
    return given


def _roots(given: dict[str, Any]) -> tuple[list[Tensor], list[Any]]:
    return _listed(given.get("tensors")), _listed(given.get("grad_tensors"))


def run_grad(context: Context, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad`` inside the block: a computation on data, not a backward of losses."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
    given = dict(zip(names, args, strict=False)) | kwargs
    inputs = _listed(given["inputs"])
    owned = [i for i in inputs if isinstance(context.look(i), Derived)]
    if not context.options.native and not all(map(context.user_code.returns, owned)):
        raise MixedSamplesError(
            "torch.autograd.grad by parameters inside a recording",
            why="parameters are detached while they are recorded, and a step computed from them "
            "would mix samples",
            fix=LOOP,
        )
    if given.get("is_grads_batched"):
        return _one_seed_at_a_time(context, given)
    roots, seeds = _listed(given["outputs"]), _listed(given.get("grad_outputs"))
    apart = _apart(context, roots, seeds)
    with _unheard(context) as trouble:
        found = _run_or_refuse(context, args, kwargs)
    code, loop = context.user_code, context.options.loop
    context.states.batches = _batches(context, [*roots, *inputs])
    for source, grad in zip(inputs, found, strict=True):
        if grad is not None:
            # of a graph that is back-propagated by itself, taps see nothing
            code.second_order = code.second_order or (loop and grad.requires_grad)
            _mark(context, source, grad, roots if apart else [], trouble)
    return found


def _run_or_refuse(context: Context, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Where nothing leads to a tensor, it may be because parameters are detached."""
    try:
        return _grad(*args, **kwargs)
    except RuntimeError as error:
        if context.options.native or "not have been used in the graph" not in str(error):
            raise
        raise MixedSamplesError(
            "torch.autograd.grad by a tensor that is used with parameters alone",
            why="what is computed from parameters and constants is detached while it is recorded",
            fix=LOOP,
        ) from error


def _one_seed_at_a_time(context: Context, given: dict[str, Any]) -> Any:
    """``is_grads_batched``: one gradient for every seed, by the loop that it stands for."""
    seeds, rows = _listed(given["grad_outputs"]), []
    count = next(len(seed) for seed in seeds if seed is not None)
    with context.mode if context.backward.busy else watching(context.mode):
        for k in range(count):
            one = {
                "grad_outputs": [None if seed is None else seed[k] for seed in seeds],
                "is_grads_batched": False,
                "retain_graph": True if k < count - 1 else given.get("retain_graph"),
            }
            rows.append(torch.autograd.grad(**{**given, **one}))
        columns = zip(*rows, strict=True)
        return tuple(None if each[0] is None else torch.stack(each) for each in columns)


def _batches(context: Context, tensors: Sequence[Tensor]) -> int:
    """The batches that tensors were computed from."""
    marks = [context.states.table.get(id(tensor)) for tensor in tensors]
    return functools.reduce(int.__or__, [mark.batches for mark in marks if mark is not None], 0)


def run_nested(context: Context, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """``backward()`` inside a backward pass: a custom function that recomputes, or checkpointing.

    Taps of the recomputation are listened to. What arrives at leaves is theirs to be returned.
    """
    with context.mode:
        roots, seeds = _roots(_given(args, kwargs))
        if called_by(_CHECKPOINT):
            _expect_apart(context, roots, seeds)
            entered(func)(*args, **kwargs)
            return
        leaves = [leaf for root in roots for leaf in _leaves(root)]
        before = [leaf.grad for leaf in leaves]
        with torch._C.DisableTorchFunction():  # to look at tensors is no call of the user's
            apart = _apart(context, roots, seeds)
        entered(func)(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        for leaf, old in zip(leaves, before, strict=True):
            grad = leaf.grad
            if grad is not None and not isinstance(context.look(leaf), Derived):
                added = old is None or same(context.look(old), context.look(leaf))
                _mark(context, leaf, grad, roots if apart and added else [])
    backward = context.backward
    if not apart and backward.receiving and backward.trouble is None:
        why = "the gradients it starts from do not belong to the samples of its roots"
        shapes = tuple(tuple(root.shape) for root in roots)
        reason = Reason("a backward inside backward", why, shapes, here())
        backward.trouble = reason.error("gradients cannot be followed in backward", fix=LOOP)


def _leaves(root: Tensor) -> list[Tensor]:
    """Where gradients of a root arrive; it may be a leaf itself."""
    return [root] if root.grad_fn is None else leaves_of(root.grad_fn)


def _expect_apart(context: Context, roots: list[Any], seeds: list[Any]) -> None:
    """Samples that were separate when a checkpoint ran must be so when it runs again."""
    with torch._C.DisableTorchFunction():
        for root, seed in zip(roots, seeds, strict=True):
            state = context.look(root)
            if isinstance(state, Mixed) and seed is not None and bool(seed.any()):
                context.backward.refuse(
                    MixedSamplesError(
                        "samples interact where a reentrant checkpoint runs again",
                        where=state.reason.where(),
                        why=state.reason.why,
                        fix="checkpoint(..., use_reentrant=False) everywhere",
                    )
                )


@contextlib.contextmanager
def _unheard(context: Context) -> Iterator[list[PersampleError]]:
    """``torch.autograd.grad`` gives parameters nothing, also where a backward pass is running.

    Yields what hooks and custom functions did that cannot be followed, known at the end.
    """
    backward, code = context.backward, context.user_code
    before = backward.receiving, backward.muted, code.nested, backward.trouble
    mode = context.mode if backward.busy else watching(context.mode)
    backward.receiving, backward.muted, code.nested, backward.trouble = False, True, True, None
    found: list[PersampleError] = []
    try:
        with mode, torch.autograd.set_multithreading_enabled(False):
            yield found
        if backward.trouble is not None:
            found.append(backward.trouble)
    finally:
        backward.receiving, backward.muted, code.nested, backward.trouble = before


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else list(value)


def _apart(context: Context, roots: list[Any], seeds: list[Any]) -> bool:
    """Whether every root's gradient starts from the samples of the root."""
    for k, root in enumerate(roots):
        state, seed = context.look(root), seeds[k] if k < len(seeds) else None
        start = None if seed is None else context.look(seed)
        if isinstance(state, Constant | None) and isinstance(start, Constant | None):
            continue  # it leads to no sample and to no parameter
        apart = isinstance(state, (Layout, Additive))
        if not apart or (start is not None and not same(start, state)):
            return False
    return True


def _mark(
    context: Context, source: Tensor, grad: Tensor, roots: Sequence[Tensor],
    trouble: Sequence[PersampleError] = (),
) -> None:  # fmt: skip
    """A gradient has its samples where the tensor has them by which it was taken.

    ``roots``: what it is the gradient of; none if samples are not separate there.
    """
    state = context.look(source)
    own = isinstance(state, Derived) and context.user_code.returns(source)
    if isinstance(state, (Constant, Derived)) and (own or not grad.requires_grad):
        state = Additive()  # of what is the same for all: a term for each sample
    if not roots or trouble or not isinstance(state, (Layout, Additive)):
        why, fix = "the gradient is not proven to keep samples separate", LOOP
        if trouble:
            why, fix = trouble[0].why, trouble[0].fix
        elif roots and isinstance(state, Constant) and source.is_leaf:
            why = "nothing said that the tensor by which it is taken holds samples"
            fix = f"tape.mark(x) before x.requires_grad_(), or record(..., n=...); or {LOOP}"
        reason = Reason("torch.autograd.grad", why, (tuple(grad.shape),), here(), fix)
        context.states.put(grad, Mixed(reason))
        return
    for root in roots:
        of_root = context.look(root)
        if isinstance(of_root, (Layout, Additive)):
            state = state.with_coupling(of_root.coupled)
    context.states.put(grad, state)
