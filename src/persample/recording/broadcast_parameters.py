"""Parameters that are repeated for every sample before they are used with data: latents, queries.

``latents.expand(n, -1, -1)`` holds parameters only, and so does what layers make of it. Where such
a tensor meets data, each of its rows meets one sample alone. Taken as one derived weight, all n
copies would be walked through for each of n samples. Here the calls that made it are run once
more, with the copies marked as the samples' own: a constant may be coloured freely. From there on
every layer is an ordinary use. Where that does not lead to samples that stay apart, the derived
tensor is used as it is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from ..errors import UsageError
from ..guards.guards import Guards
from ..layouts import Layout, Operator, closed, collect
from ..run_state import RandomState
from ..uses import Context, version
from .replayable_calls import Again, Call, Origin, differs, fits, laid_out, rooted
from .roles import Coloured, Roles

_STATEFUL = ("batch_norm", "instance_norm", "moving_avg")  # write to buffers: not to be run twice
NOTHING = object()


class Repeats:
    """The derived tensors of a recording that repeat parameters for every sample."""

    def __init__(self, context: Context, guards: Guards) -> None:
        self._context, self._guards = context, guards
        self.known: dict[int, tuple[weakref.ref[Tensor], int, Origin]] = {}
        self.trying = False  # a tensor is being made again, and may come to nothing

    def clear(self) -> None:
        """Forget every tensor."""
        self.known.clear()

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
        context, outs, taken = self._context, collect(out), [*owned, *constants]
        n = context.n or 0
        if n < 2 or context.backward.busy or context.processes is not None:
            return
        if operator.inplace or "out" in kwargs or _stateful(operator):
            return
        if not torch.is_grad_enabled() or any(map(is_lazy, taken)):
            return
        if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in outs):
            return
        call = None
        if args and isinstance(out, Tensor):
            dim = context.options.dim
            call = rooted(operator.name, args[0], out.shape, n, dim, self._zeros)
        plain = call is not None and id(out._base) in context.parameters.slots  # its own view
        call = call or self._later(func, args, kwargs, taken, n)
        if call is None:
            return
        given = {id(tensor) for tensor in owned}
        for index, tensor in enumerate(outs):
            if tensor.requires_grad and id(tensor) not in given:
                self._put(tensor, Origin(call, index, taken, plain=plain))

    def _put(self, tensor: Tensor, origin: Origin) -> None:
        key, known = id(tensor), self.known

        def forget(_: Any) -> None:
            known.pop(key, None)

        known[key] = weakref.ref(tensor, forget), version(tensor), origin

    def _get(self, tensor: Tensor) -> Origin | None:
        found = self.known.get(id(tensor))
        if found is None or found[0]() is not tensor or version(tensor) != found[1]:
            return None
        return found[2] if tensor.requires_grad else None  # detach_() counts as no write

    def _axis(self, tensor: Tensor, n: int) -> int | None:
        """The axis of a constant that may be the samples': repeated without memory, or as inputs.

        Which rows a constant has for which sample makes no difference: they are constants.
        """
        if tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        for d, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size == n and stride == 0:
                return d
        dim = self._context.options.dim
        rows = tensor.is_floating_point() and tensor.dim() > dim + 1 and tensor.shape[dim] == n
        return dim if rows else None

    def _zeros(self, like: Tensor, dim: int, axis: int) -> Tensor:
        """One zero for each sample: a negative one, which changes no number's sign."""
        shape = [self._context.n or 0 if d == axis else 1 for d in range(dim)]
        zeros = like.detach().new_full(shape, -0.0)
        self._put_constant(zeros, axis)
        return zeros

    def _put_constant(self, tensor: Tensor, axis: int) -> None:
        """Mark a constant as the samples' own: it belongs to no batch."""
        marks = self._context.states
        marks.put(tensor, closed(axis))
        marks.table[id(tensor)].batches = 0

    def _later(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], taken: Sequence[Tensor],
        n: int,
    ) -> Again | None:  # fmt: skip
        """A call that takes what is repeated: a derived tensor, or a constant."""
        if not any(self._get(t) is not None or self._axis(t, n) is not None for t in taken):
            return None
        # lists are the caller's, who may fill them with something else
        given = tree_map_only(Tensor, lambda t: t, (tuple(args), kwargs))

        def again(swap: dict[int, Tensor]) -> Any:
            new = tree_map_only(Tensor, lambda t: swap.get(id(t), t), given)
            return func(*new[0], **new[1])

        return again

    def _swapped(self, taken: Sequence[Tensor]) -> dict[int, Tensor]:
        """What to take instead: tensors made again, or else constants with marks.

        Constants beside samples need none, and may have as many rows by chance.
        """
        found = {id(t): again for t in taken if (again := self.remade(t)) is not None}
        for tensor in () if found else taken:
            axis = self._axis(tensor, self._context.n or 0)
            if axis is not None:
                alias = found[id(tensor)] = tensor.detach()
                self._put_constant(alias, axis)
        return found

    # ------------------------------------------------------------------ their use with data

    def remade(self, tensor: Tensor) -> Tensor | None:
        """The same tensor with samples in it; None where it cannot be made."""
        origin = self._get(tensor)
        if origin is None or origin.failed:
            return None
        if origin.remade is None:
            found = self._run(origin, tensor) if origin.untouched() else None
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                origin.failed = True
                return None
            origin.remade = found
        if tensor.numel():  # also later: ``.data`` is written to without being counted
            self._guards.made_again(differs(origin.remade.detach(), tensor.detach()))
        return origin.remade

    def _run(self, origin: Origin, tensor: Tensor) -> Tensor | None:
        swap = self._swapped(origin.seen)
        trying, self.trying = self.trying, True
        try:
            with origin.surroundings(), self._context.mode:
                outs = collect(origin.call(swap))
                if origin.index >= len(outs):
                    return None
                found = laid_out(outs[origin.index], tensor)
        except RuntimeError:  # what is made again is not laid out as it was
            return None
        finally:
            self.trying = trying
        return found if self._apart(found) else None

    def _apart(self, tensor: Tensor) -> bool:
        state = self._context.look(tensor)
        return state.__class__ is Layout and state.coupled is None

    def _constant(self, tensor: Tensor) -> bool:
        return not tensor.requires_grad and self._context.look(tensor) is None

    def _wanted(self, tensor: Tensor) -> bool:
        origin = self._get(tensor)
        return origin is not None and not origin.plain and not origin.failed

    def met(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        roles: Roles,
    ) -> Any:  # fmt: skip
        """A call of repeated parameters and data, with samples of their own instead."""
        owned = roles.owned
        if operator.inplace or "out" in kwargs or self._context.backward.busy:
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
        with contextlib.suppress(RuntimeError):  # what was made again is not laid out as it was
            with self._context.mode:
                out = func(*new[0], **new[1])
            call = operator, func, tuple(args), kwargs, out
            if self._fits(call, roles.coloured, [*swap.values()]):
                return out
        if random is not None:
            random.restore()
        for tensor in owned:  # its copies are not those of the samples
            origin = self._get(tensor)
            if origin is not None:
                origin.failed = True
        return NOTHING

    def _fits(self, call: Call, coloured: Coloured, remade: Sequence[Tensor]) -> bool:
        """Whether a call's results are samples' own, and no part of what was made again.

        Who writes to a view writes to the tensor that it is a view of.
        """
        operator, _, _, _, out = call
        outs = collect(out)
        if not all(self._apart(t) or self._constant(t) for t in outs):
            return False
        if operator.aliasing:
            memory = {t.untyped_storage()._cdata for t in remade}
            if any(t.untyped_storage()._cdata in memory for t in outs):
                return False
        found = [(t, self._context.look(t)) for t in outs]
        return fits(call, found, coloured, self._context.n or 0)

    # ------------------------------------------------------------------ who else looks at them

    def exposed(self, tensor: Tensor, *, graph: bool = False) -> None:
        """A user's hook is to see the gradient of this tensor: it stays what it is.

        ``graph``: or gradients of tensors that it was made of.
        """
        origin = self._get(tensor)
        if origin is None:
            return
        for source in origin.seen if graph else ():
            self.exposed(source, graph=True)
        if origin.remade is not None:
            raise UsageError(
                "a hook on learned rows that were used already",
                why="they are the same for every sample, and were split where data came in",
                fix="register the hook before the tensor is used",
            )
        origin.failed = True


def _stateful(operator: Operator) -> bool:
    return any(word in operator.name for word in _STATEFUL)
