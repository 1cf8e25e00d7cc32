"""Code that would hide its calls runs as it was written while any recording is open.

Compiled code, in any thread: inside a compiled graph nothing can be seen. torch's stance is
process-wide, so the first recording that opens takes it and the last that closes gives it back,
whatever their order.

A function under ``torch.jit.script`` keeps the Python function it was made of, which torch.compile
runs in its place, too. Where a recording watches, that is run; everywhere else it stays itself.

``torch.vmap`` of data or parameters, as the loop that it stands for: inside a transform the tensors
of samples are replaced by others. So while a recording of this thread watches, a function that is
mapped over tensors with samples, or over parameters (the members of an ensemble), is called for one
index after the other, and its results are stacked. Torch maps it first: what torch refuses (a
branch on a mapped tensor, random numbers) is refused. Everywhere else vmap stays itself: over
constants (masks made of positions), inside other transforms, and where random numbers are allowed,
which a loop would draw in another order: what such a map makes of samples cannot be followed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._functorch import apis
from torch._functorch.vmap import _process_batched_inputs
from torch.jit._state import _jit_caching_layer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import _broadcast_to_and_flatten, tree_flatten, tree_unflatten

from ..run_state import tolerance

_LOCK = threading.Lock()
_OPEN: list[Owner] = []
_STANCE = contextlib.ExitStack()
_FORCED: list[bool] = []  # not empty while the stance is taken
_SCRIPTED: Any = torch._C.ScriptFunction
_APIS: Any = apis
# how scripted functions are called, and what vmap calls, where nothing watches: others patch it
_BEFORE: list[Any] = []


class Owner(Protocol):
    """A recording."""

    @property
    def mode(self) -> TorchFunctionMode:
        """What watches."""

    def watches(self) -> bool:
        """Whether it sees the calls of this thread, and follows them forward."""

    def follows(self, tensor: Tensor) -> bool:
        """Whether a tensor holds samples, or is made of parameters."""

    def lose(self, tensor: Tensor, why: str) -> None:
        """A tensor was computed from samples where nothing could be seen."""


def as_written(owner: Owner) -> None:
    """Take the stance; its first use imports the compiler, so only where that has happened."""
    with _LOCK:
        if not _OPEN:
            _BEFORE[:] = [_SCRIPTED.__dict__["__call__"], _APIS.vmap_impl]
            _SCRIPTED.__call__, _APIS.vmap_impl = _call_scripted, _vmap
        if "torch._dynamo" in sys.modules and not _FORCED:
            _STANCE.enter_context(torch.compiler.set_stance("force_eager"))
            _FORCED.append(True)
        _OPEN.append(owner)


def as_before(owner: Owner) -> None:
    """Give it back, if this was the last owner."""
    with _LOCK:
        left = [other for other in _OPEN if other is not owner]
        if _OPEN and not left:
            _SCRIPTED.__call__, _APIS.vmap_impl = _BEFORE
            if _FORCED:
                _STANCE.close()
                _FORCED.clear()
        _OPEN[:] = left


def _call_scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a scripted function, or what it was made of where a recording of this thread watches."""
    original = getattr(function, "_torchdynamo_inline", None)
    if original is None or not _made_of(function, original) or not _watched():
        return _BEFORE[0].__get__(function)(*args, **kwargs)
    names = [argument.name for argument in function.schema.arguments]
    floats = {a.name for a in function.schema.arguments if str(a.type) == "float"}
    given = [float(v) if name in floats else v for name, v in zip(names, args, strict=False)]
    more = {name: float(v) if name in floats else v for name, v in kwargs.items()}
    return original(*given, *args[len(given) :], **more)


def _made_of(function: Any, original: Any) -> bool:
    """Whether it was scripted: what was traced does not do all that the function does."""
    return bool(_jit_caching_layer.get(original) == function.qualified_name)


def _watched() -> bool:
    modes = _get_current_function_mode_stack()
    return any(owner.mode is mode for owner in _OPEN for mode in modes)


def _vmap(
    func: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, /, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """What ``torch.vmap(func, ...)(*args, **kwargs)`` calls."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    owner = next((each for each in list(_OPEN) if each.watches()), None)
    if owner is None or inside:
        return _BEFORE[1](func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
    size, dims, flat, spec = _process_batched_inputs(in_dims, args, func)
    mapped = [leaf for leaf, dim in zip(flat, dims, strict=True) if dim is not None]
    if not size or not any(owner.follows(tensor) for tensor in mapped):
        return _BEFORE[1](func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
    if randomness != "error":
        out = _BEFORE[1](func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
        for leaf in tree_flatten(out)[0]:
            owner.lose(leaf, "torch.vmap with randomness= made it")
        return out
    with torch.no_grad(), torch._C.DisableTorchFunction():
        native = _BEFORE[1](func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
    results = []
    for k in range(size):
        leaves = [v if dim is None else v.select(dim, k) for v, dim in zip(flat, dims, strict=True)]
        results.append(func(*tree_unflatten(leaves, spec), **kwargs))
    out = _stacked(results, out_dims)
    for one, other in zip(tree_flatten(out)[0], tree_flatten(native)[0], strict=True):
        if isinstance(one, Tensor) and not _alike(one, other):
            owner.lose(one, "torch.vmap gives another result than its function, called in a loop")
    return out


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        real = one.is_floating_point() or one.is_complex()
        close = tolerance(one.dtype) if real else 0.0
        return torch.allclose(one, other, rtol=close, atol=close, equal_nan=True)


def _stacked(results: list[Any], out_dims: Any) -> Any:
    """The results of all indices, each along its own axis."""
    spec = tree_flatten(results[0])[1]
    places: Any = _broadcast_to_and_flatten(out_dims, spec)
    if isinstance(results[0], Tensor):
        places = list(out_dims) if isinstance(out_dims, tuple) else [out_dims]
    columns = list(zip(*(tree_flatten(result)[0] for result in results), strict=True))
    joined = [
        column[0] if place is None else torch.stack(column).movedim(0, place)
        for column, place in zip(columns, places, strict=True)
    ]
    return tree_unflatten(joined, spec)
