"""One use: one call of an operator that took a parameter and data, and what backward brought it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import Place, unheard
from ..layouts import Layout, collect
from ..run_state import RandomState
from .pass_state import PassState
from .signature import Kind, Tapped


@dataclass(frozen=True, slots=True)
class View:
    """Where a derived tensor's elements are in the (contiguous) parameter it is a view of."""

    name: str
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """A derived tensor that holds rows of a recorded table: ``table[index]``."""

    name: str
    index: Tensor
    padding: int
    shape: torch.Size
    version: int


class Operand:
    """A parameter argument of a use: a parameter itself (``name``) or derived from parameters.

    ``owner`` is the id of the parameter itself. The rest is of derived tensors. ``edge`` leads to
    the parameters behind it. ``view`` is set if it is a strided view of one parameter, with the
    axes ``expanded`` (along which it is repeated) shrunk to one; ``once`` if what is repeated was
    computed from parameters; ``lookup`` if it holds rows of one, picked by constants.
    """

    edge: Any = None
    view: View | None = None
    expanded: tuple[int, ...] = ()
    once: Operand | None = None
    lookup: Lookup | None = None
    sources: list[str] | None = None  # parameters behind it, once known
    lookups: dict[int, Any] | None = None  # look-ups behind it, once known, by their table's id

    def __init__(
        self, position: int, value: Tensor, name: str | None, version: int, owner: int = 0
    ) -> None:
        self.position, self.value, self.name = position, value, name
        self.version, self.owner = version, owner

    def moved(self, position: int) -> Operand:
        """The same as another argument."""
        found = copy.copy(self)
        found.position = position
        return found

    @property
    def wanted(self) -> bool:
        """Whether a recorded parameter is behind it."""
        return self.name is not None or self.edge is not None


@dataclass(slots=True)
class Firing:
    """What one backward brought: the saved data arguments and the output gradients."""

    saved: tuple[Tensor, ...]
    grads: tuple[Tensor | None, ...]


class Receiver(Protocol):
    """Takes what taps bring."""

    def expect(self, use: Use) -> None:
        """A use was recorded in forward."""

    def receive(
        self, use: Use, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> None:
        """A tap fired in backward, with the data it saved and its output gradients."""


class Listener(Protocol):
    """The recording that a use belongs to."""

    closed: bool  # no query will follow
    backward: PassState

    @property
    def receiver(self) -> Receiver:
        """Takes what taps bring."""


class Use:
    """Everything needed to run the operator again and to say whose gradient is whose.

    ``context`` is a weak reference; ``batches`` are those of its data.
    """

    tapped: Tapped
    rng: RandomState | None = None
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    fingerprint: Tensor | None = None
    guessed: Tensor | None = None  # where its results' samples are a guess
    rule: Callable[..., Any] | None = None  # its own, where none belongs to the operator
    closed: bool = False  # one node of the graph, whose gradient by data is a use again

    def __init__(
        self, context: Callable[[], Listener | None], kind: Kind, func: Callable[..., Any],
        leaves: list[Any], operands: list[Operand], place: Place | None, batches: int,
    ) -> None:  # fmt: skip
        self.context, self.kind, self.func, self.leaves = context, kind, func, leaves
        self.operands, self.place, self.batches = operands, place, batches

    @property
    def operator(self) -> str:
        """The operator's name."""
        return self.kind.operator

    @property
    def wanted(self) -> bool:
        """Whether a recorded parameter is behind one of its operands."""
        for operand in self.operands:
            if operand.name is not None or operand.edge is not None:
                return True
        return False

    @property
    def out_layouts(self) -> list[Layout]:
        """The layouts of the tapped results."""
        return self.tapped.layouts

    def fire(self, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        """Called by the tap in backward."""
        context = self.context()
        if context is None or context.closed:
            unheard()
        else:
            with torch._C.DisableTorchFunction():
                context.receiver.receive(self, saved, grads)

    def values(self, firing: Firing) -> list[Any]:
        """The call's leaves: saved data, constants and the operands' values."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.kind.data, firing.saved, strict=True):
            leaves[position] = tensor
        for operand in self.operands:
            leaves[operand.position] = operand.value
        return leaves

    def arguments(self, firing: Firing) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments."""
        return self.kind.template.call(self.values(firing))

    def bind(self, firing: Firing, *names: str) -> list[Any]:
        """The first arguments by position, or by name."""
        template = self.kind.template
        if template.spec is None and not template.names:  # the usual call
            found = self.values(firing)[: len(names)]
            return found + [None] * (len(names) - len(found))
        args, kwargs = self.arguments(firing)
        found = list(args[: len(names)])
        for name in names[len(found) :]:
            found.append(
                next((kwargs[a] for a in _ALIASES.get(name, (name,)) if a in kwargs), None)
            )
        return found

    def option(self, name: str, default: Any) -> Any:
        """A keyword-only argument that is not a tensor."""
        if self.kind.template.spec is None and name not in self.kind.template.names:
            return default
        return self.kind.template.call(list(self.leaves))[1].get(name, default)

    def narrow(self) -> torch.dtype:
        """float16 if one of the results is: gradients may vanish there."""
        half = torch.float16 in self.tapped.dtypes
        return torch.float16 if half else torch.float32

    def call(
        self, saved: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
        """Arguments made of given data and parameters, and the leaves that they are made of."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.kind.data, saved, strict=True):
            leaves[position] = tensor
        for operand, value in zip(self.operands, values, strict=True):
            leaves[operand.position] = value
        if self.kind.inplace:
            leaves[0] = leaves[0].clone()
        return *self.kind.template.call(leaves), leaves

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: Sequence[Tensor]) -> Any:
        """The operator's result under the circumstances that it ran in."""
        with self._surroundings(saved):
            out = self.func(*args, **kwargs)
        return args[0] if self.kind.inplace else out

    def replay(self, saved: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """The operator's tapped results, computed again from given data and parameters."""
        args, kwargs, _ = self.call(saved, values)
        outs = collect(self.run(args, kwargs, saved))
        return [outs[k] for k in self.tapped.results]

    @contextlib.contextmanager
    def _surroundings(self, saved: Sequence[Tensor]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            if self.rng is not None:
                devices = [t.device for t in saved if t.device.type == "cuda"]
                stack.enter_context(torch.random.fork_rng(devices))
                self.rng.restore()
            yield


_ALIASES = {
    "input": ("input", "self"),
    "other": ("other", "mat2", "vec", "tensor2"),
    "mat1": ("mat1", "batch1", "mat"),
    "mat2": ("mat2", "batch2", "vec"),
    "indices": ("indices", "input"),
}
