"""Calls on constants before the model is called: `torch.cat([x, t])`, where gradients go back to x.

Whether such constants hold samples shows at the inputs of the model that were computed from them.
Then the calls are followed again, with row i of every constant as sample i's: a constant may have
any owner. If all results fit the layouts of those inputs, that is where the samples are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..backward.user_backward import ENGINE
from ..layouts import Constant, Layout, Operator, State, closed, collect, propagate
from ..uses import Context, Derived, same
from .roles import Roles


class EarlyCall(NamedTuple):
    """A call whose results have a gradient history that leads to constants alone."""

    operator: Operator
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


class EarlyCalls:
    """Those of one recording, until samples take part in a call."""

    def __init__(self, context: Context) -> None:
        self._context, self.over = context, False
        self.calls: list[EarlyCall] = []
        self._found: dict[int, tuple[Tensor, Layout]] = {}

    def stop(self) -> None:
        """Samples have entered, or what was called cannot be followed again."""
        self.over = True
        self.calls.clear()
        self._found.clear()

    def note(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Remember a call on constants, if gradients flow back through it.

        The values of integers and masks may be others when it is followed again.
        """
        if operator.inplace or "out" in kwargs:
            self.stop()
        elif any(tensor.requires_grad for tensor in collect(out)):
            given = collect([args, kwargs])
            if all(tensor.is_floating_point() or tensor.is_complex() for tensor in given):
                self.calls.append(EarlyCall(operator, func, tuple(args), kwargs, out))
            else:
                self.stop()

    def before_graph_call(self, func: Any) -> None:
        """A gradient is asked for, or hooks are registered."""
        if func in ENGINE:
            self.settle()
        elif func is Tensor.register_hook:
            self.stop()

    def ends_at(self, roles: Roles) -> bool:
        """Whether samples take part for the first time, and constants turned out to hold them."""
        if roles.data:
            return self.settle()
        if roles.owned and roles.coloured:  # derived from parameters and such constants
            self.stop()
        return False

    def settle(self) -> bool:
        """Samples have entered: give them to the constants of these calls, if all of it fits."""
        states = self._context.states
        fits = bool(self.calls and self._context.n) and self._fit()
        if fits:
            states.batches = 0
            for tensor, layout in self._found.values():
                if isinstance(self._context.look(tensor), Constant):
                    states.put(tensor, layout)
        self.stop()
        return fits

    def _fit(self) -> bool:
        """Whether samples are where the inputs of the model have them that were computed here."""
        made = {id(tensor) for call in self.calls for tensor in collect(call.out)}
        given = [t for call in self.calls for t in collect([call.args, call.kwargs])]
        starts = [t for t in given if t.requires_grad and id(t) not in made]
        if not all(map(self._enters, starts)) or not self._all_seen(made):
            return False
        reached = False
        for tensor, state in self._followed():
            if isinstance(state, Constant | None):
                continue
            known = self._context.look(tensor)
            if not isinstance(state, Layout) or state.coupled is not None:
                return False
            if isinstance(known, Layout) and (self._context.n == 1 or same(known, state)):
                reached = True
            elif not isinstance(known, Constant):
                return False
            self._found[id(tensor)] = tensor, state
        return reached

    def _enters(self, tensor: Tensor) -> bool:
        """A leaf: row i is sample i's, if it has n rows and is no parameter of another model."""
        dim, known = self._context.options.dim, self._context.look(tensor)
        if isinstance(known, Layout):
            self._found[id(tensor)] = tensor, known
        elif tensor.__class__ is Tensor and isinstance(known, Constant) and tensor.dim() > dim:
            if tensor.shape[dim] == self._context.n:
                self._found[id(tensor)] = tensor, closed(dim)
        return tensor.is_leaf and not tensor._backward_hooks

    def _all_seen(self, made: set[int]) -> bool:
        """Whether no other call made a tensor that gradients flow back from."""
        for mark in list(self._context.states.table.values()):
            tensor = mark()
            if tensor is None or tensor.is_leaf or isinstance(mark.state, Derived):
                continue
            if id(tensor) not in made:
                return False
        return True

    def _followed(self) -> Iterator[tuple[Tensor, State | None]]:
        """The results of every call, and where their samples are."""
        for call in self.calls:
            outs = collect(call.out)
            given = collect([call.args, call.kwargs])
            coloured = [self._found[id(tensor)] for tensor in given if id(tensor) in self._found]
            states: Any = None
            if coloured:
                rest, n = call[:-1], self._context.n or 0
                states = propagate(*rest, call.out, [*coloured], n)
            each = states if isinstance(states, list) else [states] * len(outs)
            yield from zip(outs, each, strict=True)
