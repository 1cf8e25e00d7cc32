"""Back-propagation that the user starts with torch's own functions inside the block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .backward import LOOP, checked_backward
from .enter import entered
from .errors import MixedSamplesError, Reason, UsageError, here
from .layout import Additive, Layout, Mixed
from .marks import Derived

if TYPE_CHECKING:
    from .recorder import Recorder

_grad = entered(torch.autograd.grad)
ENGINE = frozenset((Tensor.backward, torch.autograd.backward, torch.autograd.grad))


def run_backward(
    recorder: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """A plain ``backward()`` inside the block."""
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph")
    if func is Tensor.backward:
        names = ("self", "gradient", "retain_graph", "create_graph")
    given = dict(zip(names, args, strict=False)) | kwargs
    roots = given.get("self", given.get("tensors"))
    roots = [roots] if isinstance(roots, Tensor) else list(roots or ())
    seeds = given.get("gradient", given.get("grad_tensors"))
    seeds = seeds[0] if isinstance(seeds, (list, tuple)) else seeds
    retain = bool(given.get("retain_graph")) or bool(given.get("create_graph"))
    if given.get("inputs") is not None:
        raise UsageError("backward(inputs=...) inside a recording", fix="use torch.autograd.grad")
    if len(roots) != 1:
        raise UsageError("several roots in one backward", fix="add them up, or call it for each")
    root = roots[0]
    if seeds is not None:
        _plain(recorder, root, seeds, retain)
        return
    if root.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    checked_backward(recorder, root, torch.ones_like(root), 1.0, retain)


def _plain(recorder: Recorder, root: Tensor, seed: Tensor, retain: bool) -> None:
    constant = bool((seed == seed.flatten()[:1]).all()) if seed.numel() else True
    if not constant:
        recorder.tape._ledger.scalar = True  # weighted losses: rows are weighted gradients
    checked_backward(recorder, root, seed, 1.0, retain)
    if not constant or float(seed.flatten()[0] if seed.numel() else 1.0) != 1.0:
        recorder.tape._ledger.scalar = True


def run_grad(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad`` inside the block: a computation on data, not a backward of losses."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
    given = dict(zip(names, args, strict=False)) | kwargs
    inputs = given["inputs"]
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if not recorder.native and any(isinstance(recorder.look(i), Derived) for i in inputs):
        raise MixedSamplesError(
            "torch.autograd.grad by parameters inside a recording",
            why="parameters are detached while they are recorded, and a step computed from them "
            "would mix samples",
            fix=LOOP,
        )
    ledger = recorder.tape._ledger
    ledger.muted = True
    try:
        with recorder.watching(), torch.autograd.set_multithreading_enabled(False):
            found = _grad(*args, **kwargs)
    finally:
        ledger.muted = False
    outputs = given["outputs"]
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    apart = all(isinstance(recorder.look(o), (Layout, Additive)) for o in outputs)
    for source, grad in zip(inputs, found, strict=True):
        if grad is None:
            continue
        state = recorder.look(source)
        if grad.requires_grad or not apart or not isinstance(state, Layout):
            why = "the gradient of a gradient reaches parameters in ways that were not recorded"
            reason = Reason(
                "torch.autograd.grad",
                why,
                (tuple(grad.shape),),
                here(),
                'record(..., unproven="loop") follows it',
            )
            recorder.marks.put(grad, Mixed(reason))
        else:
            recorder.marks.put(grad, state)
    return found
