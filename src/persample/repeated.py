"""Parameters that are repeated for every sample before any data are met: latents, learned queries.

``latents.expand(n, -1, -1)`` holds parameters only, and so does what layers make of it. Where such
a tensor meets data, each of its rows meets one sample alone. Taken as one derived weight, all n
copies would be walked through for each of n samples. Here the calls that made it are run once
more, with the copies marked as the samples' own: a constant may be coloured freely. From there on
every layer is an ordinary use. Where that does not lead to samples that stay apart, the derived
tensor is used as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from .conditions import RandomState
from .errors import UsageError
from .layout import Layout, closed
from .marks import version
from .propagate import Operator, collect

if TYPE_CHECKING:
    from .recorder import Recorder

_EXPANDS = frozenset(("expand", "expand_as", "broadcast_to"))
_REPEATS = frozenset(("repeat", "tile"))
_STATEFUL = ("batch_norm", "instance_norm", "moving_avg")  # write to buffers: not to be run twice
NOTHING = object()


Again = Callable[[dict[int, Tensor]], Any]


class Origin:
    """The call that made a derived tensor, and the tensor made again with samples in it.

    ``call`` takes, for tensors by id, what to take instead; ``plain``: a parameter's own view,
    which rules know how to take.
    """

    __slots__ = ("call", "failed", "index", "plain", "remade", "seen")

    def __init__(self, call: Again, index: int, seen: Sequence[Tensor], *, plain: bool) -> None:
        self.call, self.index, self.plain = call, index, plain
        self.seen = [(tensor, version(tensor)) for tensor in seen]
        self.remade: Tensor | None = None
        self.failed = False

    def untouched(self) -> bool:
        """Whether nobody wrote to what the call took."""
        return all(version(tensor) == number for tensor, number in self.seen)


class Repeats:
    """The derived tensors of a recording that repeat parameters for every sample."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.known: dict[int, tuple[weakref.ref[Tensor], int, Origin]] = {}
        self._apart_from: list[Tensor] = []  # whether a tensor differs from the one made again

    def clear(self) -> None:
        """Forget every tensor."""
        self.known.clear()
        self._apart_from.clear()

    def changed(self) -> bool:
        """Whether a tensor that was made again came out another: one look for all of them."""
        looked, self._apart_from = self._apart_from, []
        return any(bool(differs) for differs in looked)

    # ------------------------------------------------------------------ how they were made

    def random_state(self, operator: Operator, owned: Sequence[Tensor]) -> RandomState | None:
        """Before a call that may draw numbers: one that does is not run again."""
        if not operator.random or not any(self._get(t) is not None for t in owned):
            return None
        return RandomState(owned[0].device)

    def note(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        out: Any, owned: Sequence[Tensor], constants: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """A call on parameters and constants: remember it where its results are repeated."""
        recorder = self.recorder
        n = recorder.n or 0
        if n < 2 or recorder.busy or recorder.spread is not None or not torch.is_grad_enabled():
            return
        if operator.inplace or "out" in kwargs or _stateful(operator):
            return
        if any(is_lazy(tensor) for tensor in (*owned, *constants)):
            return
        call = self._root(operator, args, out, n)
        plain = call is not None and self._is_view(out)
        if call is None:
            call = self._later(func, args, kwargs, [*owned, *constants], n)
        if call is None:
            return
        outs: list[Tensor] = []
        collect(out, outs)
        given = {id(tensor) for tensor in owned}
        for index, tensor in enumerate(outs):
            if tensor.requires_grad and id(tensor) not in given:
                self._put(tensor, Origin(call, index, [*owned, *constants], plain=plain))

    def _is_view(self, out: Tensor) -> bool:
        return out._base is not None and id(out._base) in self.recorder.parameters.slots

    def _put(self, tensor: Tensor, origin: Origin) -> None:
        key, known = id(tensor), self.known

        def forget(_: Any) -> None:
            known.pop(key, None)

        known[key] = weakref.ref(tensor, forget), version(tensor), origin

    def _get(self, tensor: Tensor) -> Origin | None:
        found = self.known.get(id(tensor))
        if found is None or found[0]() is not tensor or version(tensor) != found[1]:
            return None
        return found[2]

    def _root(self, operator: Operator, args: Sequence[Any], out: Any, n: int) -> Again | None:
        """A call that repeats a parameter n times along one axis, as a sum with samples' zeros."""
        if operator.name not in _EXPANDS | _REPEATS or not isinstance(out, Tensor) or not args:
            return None
        value, shape = args[0], out.shape
        lead = out.dim() - value.dim()
        before = [1] * lead + [*value.shape]
        if operator.name in _EXPANDS:
            axes = [d for d in range(out.dim()) if before[d] == 1 and shape[d] == n]
            if not axes:
                return None
            axis = axes[0]

            def expanded(_: dict[int, Tensor]) -> Any:
                return (value.view(before) + self._zeros(value, len(shape), axis)).expand(shape)

            return expanded
        times = [s // b if b else 0 for s, b in zip(shape, before, strict=True)]
        if times.count(n) != 1 or any(t not in (1, n) for t in times):
            return None
        axis = times.index(n)

        def repeated(_: dict[int, Tensor]) -> Any:
            apart = value.reshape(before).unsqueeze(axis)
            zeros = self._zeros(value, len(shape) + 1, axis)
            return (apart + zeros).flatten(axis, axis + 1)

        return repeated

    def _axis(self, tensor: Tensor, n: int) -> int | None:
        """The axis of a constant that may be the samples': repeated without memory, or as inputs.

        Which rows a constant has for which sample makes no difference: they are constants.
        """
        if tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        for d, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size == n and stride == 0:
                return d
        dim = self.recorder.inputs.dim
        rows = tensor.is_floating_point() and tensor.dim() > dim + 1 and tensor.shape[dim] == n
        return dim if rows else None

    def _zeros(self, like: Tensor, dim: int, axis: int) -> Tensor:
        """One zero for each sample."""
        n = self.recorder.n or 0
        zeros = like.detach().new_zeros([n if d == axis else 1 for d in range(dim)])
        self.recorder.marks.put(zeros, closed(axis))
        return zeros

    def _later(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], taken: Sequence[Tensor],
        n: int,
    ) -> Again | None:  # fmt: skip
        """A call that takes what is repeated: a derived tensor, or a constant."""
        if not any(self._get(t) is not None or self._axis(t, n) is not None for t in taken):
            return None

        def again(swap: dict[int, Tensor]) -> Any:
            new = tree_map_only(Tensor, lambda t: swap.get(id(t), t), (tuple(args), kwargs))
            return func(*new[0], **new[1])

        return again

    def _swapped(self, taken: Sequence[Tensor]) -> dict[int, Tensor]:
        """What to take instead: tensors made again, and constants with marks."""
        found: dict[int, Tensor] = {}
        for tensor in taken:
            if self._get(tensor) is not None:
                again = self.remade(tensor)
                if again is not None:
                    found[id(tensor)] = again
            elif not tensor.requires_grad:
                axis = self._axis(tensor, self.recorder.n or 0)
                if axis is not None:
                    alias = found[id(tensor)] = tensor.detach()
                    self.recorder.marks.put(alias, closed(axis))
        return found

    # ------------------------------------------------------------------ where they meet data

    def remade(self, tensor: Tensor) -> Tensor | None:
        """The same tensor with samples in it; None where it cannot be made."""
        origin = self._get(tensor)
        if origin is None or origin.failed:
            return None
        if origin.remade is None:
            found = self._run(origin) if origin.untouched() else None
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                origin.failed = True
                return None
            if tensor.numel():
                self._apart_from.append(_differs(found.detach(), tensor.detach()))
            origin.remade = found
        return origin.remade

    def _run(self, origin: Origin) -> Tensor | None:
        swap = self._swapped([tensor for tensor, _ in origin.seen])
        with self.recorder.mode:
            out = origin.call(swap)
        outs: list[Tensor] = []
        collect(out, outs)
        if origin.index >= len(outs):
            return None
        return outs[origin.index] if self._apart(outs[origin.index]) else None

    def _apart(self, tensor: Tensor) -> bool:
        state = self.recorder.look(tensor)
        return state.__class__ is Layout and state.coupled is None

    def _constant(self, tensor: Tensor) -> bool:
        return not tensor.requires_grad and self.recorder.look(tensor) is None

    def _wanted(self, tensor: Tensor) -> bool:
        origin = self._get(tensor)
        return origin is not None and not origin.plain and not origin.failed

    def met(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        owned: Sequence[Tensor],
    ) -> Any:  # fmt: skip
        """A call in which repeated parameters meet data, with samples of their own instead."""
        if operator.inplace or "out" in kwargs or self.recorder.busy:
            return NOTHING
        if _stateful(operator) or not any(self._wanted(t) for t in owned):
            return NOTHING
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return NOTHING  # a recomputation must save what was saved here
        swap = {id(t): found for t in owned if (found := self.remade(t)) is not None}
        if not swap:
            return NOTHING
        new = tree_map_only(Tensor, lambda t: swap.get(id(t), t), (tuple(args), kwargs))
        random = RandomState(owned[0].device) if operator.random else None
        with self.recorder.mode:
            out = func(*new[0], **new[1])
        outs: list[Tensor] = []
        collect(out, outs)
        if all(self._apart(t) or self._constant(t) for t in outs):
            return out
        if random is not None:
            random.restore()
        for tensor in owned:  # its copies are not those of the samples
            origin = self._get(tensor)
            if origin is not None:
                origin.failed = True
        return NOTHING

    # ------------------------------------------------------------------ who else looks at them

    def exposed(self, tensor: Tensor) -> None:
        """A user's hook is to see the gradient of this tensor: it stays what it is."""
        origin = self._get(tensor)
        if origin is None:
            return
        if origin.remade is not None:
            raise UsageError(
                "a hook on learned rows that were used already",
                why="they are the same for every sample, and were taken apart where they met data",
                fix="register the hook before the tensor is used",
            )
        origin.failed = True


def _stateful(operator: Operator) -> bool:
    return any(word in operator.name for word in _STATEFUL)


def _differs(found: Tensor, tensor: Tensor) -> Tensor:
    """Whether a tensor was not made again, but for rounding: what was read has changed unseen."""
    known = tensor.isfinite()
    gap = torch.where(known, found - tensor, 0).abs().amax()
    size = torch.where(known, tensor, 0).abs().amax()
    return torch.gt(gap, size * torch.finfo(tensor.dtype).eps ** 0.5)
