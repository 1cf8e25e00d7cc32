"""What a plain step holds at its highest point, read off the graph of a recorded one.

The two have the same forward, and the same gradients of activations. Only the arguments of uses are
not saved in the recorded graph, whose parameters are detached: taps bring those. Gradients of
parameters and gradients that wait for others are left out: a plain step holds rather more.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..autograd_graph import nodes_of
from ..forms import LITTLE
from ..uses import Context


class PlainStep:
    """The memory that an ordinary backward pass of the same losses finds, frees and needs."""

    def __init__(self, losses: Tensor, parameters: Iterable[Tensor]) -> None:
        self._elsewhere = {_memory(parameter)[0] for parameter in parameters}
        # bytes of each memory, and the node that frees it: later nodes have lower numbers
        self._held: dict[int, tuple[int, int]] = {}
        self._gradients: list[tuple[int, int]] = []  # what each node is given and makes
        self._hooked = False  # what is saved may be elsewhere, or be computed again
        for node in nodes_of(losses.grad_fn):
            if not hasattr(node, "variable"):
                self._look_at(node)

    def _look_at(self, node: Any) -> None:
        saved = [tensor for tensor in map(self._content, _saved(node)) if tensor is not None]
        passing = sum(_bytes(about) for about in node._input_metadata)
        if saved:  # others may pass on the gradient that they were given
            passing += sum(
                _bytes(into._input_metadata[k]) for into, k in node.next_functions if into
            )
        self._gradients.append((node._sequence_nr(), passing))
        self._add(saved, node._sequence_nr())

    def _content(self, saved: Any) -> Tensor | None:
        # older versions of torch do not tell whether there is a hook
        if saved is None or getattr(saved, "unpack_hook", self) is not None:
            self._hooked = self._hooked or saved is not None
            return None
        found: Tensor | None = saved.data
        return found

    def _add(self, tensors: Iterable[Tensor], number: int) -> None:
        for tensor in tensors:
            at, size = _memory(tensor)
            if at not in self._elsewhere:
                self._held[at] = size, min(number, self._held.get(at, (0, number))[1])

    def bring(self, saved: Iterable[Tensor]) -> None:
        """The arguments of a use, from its tap: they were there before the pass began."""
        node = torch._C._current_autograd_node()
        if node is not None:
            self._add(saved, node._sequence_nr())

    def peak(self) -> int:
        """Bytes at the highest point; 0 where code of the user's keeps what forward saved."""
        if self._hooked:
            return 0
        freed = Counter[int]()
        for size, number in self._held.values():
            freed[number] += size
        highest = held = freed.total()
        for number, passing in sorted(self._gradients, reverse=True):
            highest = max(highest, held + passing)
            held -= freed[number]
        return highest


def _saved(node: Any) -> Iterator[Any]:
    """What a node keeps, not unpacked; nothing once it is freed."""
    for name in _names(node.__class__):
        with contextlib.suppress(RuntimeError):
            found = getattr(node, name)
            yield from found if isinstance(found, (tuple, list)) else (found,)


@functools.cache
def _names(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def _bytes(about: Any) -> int:
    return 0 if about.is_nested_tensor else math.prod(about.shape) * about.dtype.itemsize


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's memory is, and its bytes: zero where it has none of its own."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return 0, 0


@contextlib.contextmanager
def estimating(context: Context, losses: Tensor) -> Iterator[None]:
    """Note what a plain step holds while losses are back-propagated: once for a learned program.

    It is not asked for where rows would be small, or have a budget of their own.
    """
    backward, known = context.backward, context.states.results.known_of(losses)
    found, plain = None if known is None else known.plain_bytes, None
    if found is None and _matters(context):
        with torch._C.DisableTorchFunction():
            plain = PlainStep(losses, context.parameters.model.parameters())
        backward.listener = plain.bring
    try:
        yield
    finally:
        backward.listener = None
    if found is None:  # reentrant checkpoints run parts of the graph that were not there before
        found = 0 if plain is None or context.user_code.reentrant else plain.peak()
    if known is not None and backward.trouble is None:
        known.plain_bytes = found
    backward.plain_bytes = max(backward.plain_bytes, found)


def _matters(context: Context) -> bool:
    options, parameters = context.options, context.parameters.asked.values()
    size = (context.n or 0) * sum(parameter.nbytes for parameter in parameters)
    return size > LITTLE and not options.lean and options.rows is None
