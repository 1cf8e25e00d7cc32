"""One torch call inside a recording: who takes part in it, and where the samples go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..backward.passes import Passes
from ..backward.user_backward import expect_reached
from ..guards.guards import Guards
from ..layouts import (
    CONSTANT,
    COUNTS,
    ZEROS,
    Additive,
    Constant,
    Earlier,
    Layout,
    Mixed,
    Moves,
    Operator,
    State,
    collect,
    separate_by_zeros,
)
from ..modes import entered, kept
from ..uses import Context
from .broadcast_parameters import NOTHING, Repeats
from .early_calls import EarlyCalls
from .follower import Follower
from .graph_calls import GraphCalls
from .learner import Learner
from .program import Cursor
from .result_states import Marking
from .roles import Coloured, Roles, Sorting, Transformed
from .use_capture import capture_use, not_per_sample
from .user_code.custom_functions import CustomFunctions


class Dispatch:
    """Handles every call that the recorder's mode sees."""

    def __init__(
        self, context: Context, guards: Guards, passes: Passes, custom: CustomFunctions
    ) -> None:
        self._context, self._guards, self._custom = context, guards, custom
        self._states, self._lean = context.states, context.options.lean
        self.entering: list[Any] = []  # Python functions whose bodies run
        self._marking, self._sorted = Marking(context, guards), Sorting(context)
        self._repeats, self._early = Repeats(context, guards), EarlyCalls(context)
        self._moves = Moves()
        self._graph = GraphCalls(context, guards, passes, self._repeats)
        self._cursor = Cursor(context)
        follower = Follower(
            context, guards, self._cursor, custom, self._repeats.known,
            self.entering,
        )  # fmt: skip
        self.follow, self._learn = follower.follow, Learner(context, self._cursor, follower)

    def clear(self) -> None:
        """Forget every tensor."""
        self._repeats.clear()
        self._early.stop()
        self._moves.clear()
        self._cursor.clear()

    def handle(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Any call that is not a mere look at an attribute."""
        if self._lean and self._context.backward.receiving:  # a recomputation, perhaps
            self._guards.comparison.guarded = True
        if operator.graph:
            self._states.settle()
            if self._early.calls:
                self._early.before_graph_call(func)
            found = self._graph.answer(operator, func, args, kwargs)
            if found is not NOTHING:
                return found
        if operator.enter and func not in self.entering and not operator.straight(args, kwargs):
            return self.enter(func, args, kwargs)
        self._states.settle()
        self._states.batches = 0
        try:
            roles = self._sorted(operator, args, kwargs)
        except Transformed:  # what comes out of the transform belongs to no sample
            self._context.user_code.transforming = True
            self._guards.numbers.note_transformed(collect([args, kwargs]))
            return func(*args, **kwargs)
        if not self._early.over and self._early.ends_at(roles):
            roles = self._sorted(operator, args, kwargs)
        owned, wanted = roles.owned, torch.is_grad_enabled()
        self._states.batches = roles.all_batches()
        if roles.coloured:
            if wanted:
                self._custom.leave()
            else:
                self._custom.read(roles.coloured)
        if roles.loose and wanted and (owned or self._lean):
            self._guards.constants_used(roles.loose, derived=bool(owned) and not roles.data)
        if not owned:
            if not roles.coloured:
                if operator.name == "data":
                    self._states.alias(args[0])
                return self._constant(operator, func, args, kwargs, roles)
            return self._data(operator, func, args, kwargs, roles)
        if not wanted and self._context.parameters.partial:
            expect_reached(self._context, owned)
        if not roles.data or (not roles.closed and self._of_nobody(roles)):
            return self._derive(operator, func, args, kwargs, roles)
        if not wanted or self._returned(owned):
            return self._data(operator, func, args, kwargs, roles)
        return self._use(operator, func, args, kwargs, roles)

    def _constant(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        roles: Roles,
    ) -> Any:  # fmt: skip
        """Neither samples nor parameters: positions are known by what they are computed from."""
        out, positions = func(*args, **kwargs), self._context.positions
        if operator.name in COUNTS or (positions and roles.loose and not operator.random):
            if all(map(positions.holds, roles.loose)):
                positions.add(collect(out))
        return out

    def _use(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        roles: Roles,
    ) -> Any:  # fmt: skip
        """A parameter interacts with samples."""
        if self._repeats.known:
            found = self._repeats.met(operator, func, args, kwargs, roles)
            if found is not NOTHING:
                return found
            self._states.batches = roles.all_batches()
        if not roles.closed:
            bad = not_per_sample(operator, roles.coloured)
            if bad is not None:
                out = func(*args, **kwargs)
                result, written = args[0] if operator.inplace else out, operator.inplace
                self._marking.store(operator, result, bad, roles.coloured, written=written)
                return out
        out, kind = capture_use(self._context, operator, func, args, kwargs, roles, self._by_zeros)
        if kind is not None:
            self._learn.use(operator, func, args, kwargs, roles, out, kind)
        return out

    def _returned(self, owned: Sequence[Tensor]) -> bool:
        """Whether gradients by these are taken by the custom function whose backward runs.

        Its own code does it, natively: it is run once more for every sample.
        """
        code = self._context.user_code
        return bool(code.returning) and all(map(code.returns, owned))

    def _of_nobody(self, roles: Roles) -> bool:
        """Whether no element of the data is a sample's: then they are constants, and say so.

        Relations without edges, places that nothing was added to. What has a history may be of
        parameters that met constant rows, and has to be followed.
        """
        if not self._states.n or not all(_nobodys(t, s) for t, s in roles.coloured):
            return False
        roles.coloured = [(tensor, CONSTANT) for tensor, _ in roles.coloured]
        roles.data = False
        return True

    def _of_earlier_steps(self, coloured: Coloured, out: Any) -> Any:
        """The states of what was computed from an earlier step's tensors and constants alone.

        What keeps their graph cannot be followed, like them; the rest (``detach()``,
        ``zeros_like``) is a constant, like any tensor from outside.
        """
        earlier = next((state for _, state in coloured if isinstance(state, Earlier)), None)
        if earlier is None or not all(isinstance(s, (Earlier, Constant)) for _, s in coloured):
            return NOTHING
        if any(self._context.written.holds(tensor) for tensor, _ in coloured):
            return NOTHING  # through .data, perhaps
        return [earlier if tensor.requires_grad else None for tensor in collect(out)]

    def enter(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a Python function of torch with the recorder watching its body.

        A C function may report itself under the name of the Python function that calls it; met
        again inside, the name means the C function.
        """
        self.entering.append(func)
        try:
            with self._context.mode:
                return entered(func)(*args, **kwargs)
        finally:
            self.entering.pop()

    def _data(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        roles: Roles,
    ) -> Any:  # fmt: skip
        """No parameter is involved, or no gradient is wanted: run, then follow the samples."""
        seen = tuple(args)
        if operator.inplace and operator.aliasing:  # the shape before the call matters
            before = args[0].detach()
            seen = (before, *args[1:])
            roles.coloured = [(before if t is args[0] else t, s) for t, s in roles.coloured]
        out = func(*args, **kwargs)
        result = args[0] if operator.inplace and args else out
        n, states = self._states.n or 0, cast(Any, NOTHING)
        if not roles.closed and not roles.owned:
            states = self._of_earlier_steps(roles.coloured, result)
        if states is NOTHING:
            states = self._moves.propagate(operator, func, seen, kwargs, result, roles.coloured, n)
        plain = roles.closed and states.__class__ is Layout
        if plain and result.__class__ is Tensor and "out" not in kwargs:
            like = None
            if operator.aliasing:
                like = self._marking.memory(operator, result, roles.coloured[0][0])
            self._states.put(result, states, like)
        else:
            found = self._by_zeros(operator, seen, kwargs, result, roles, states) or states
            written = operator.inplace or "out" in kwargs
            self._marking.store(operator, result, found, roles.coloured, written=written)
        if not roles.owned:
            self._learn.data(operator, func, args, kwargs, roles, out, states)
        if not self._early.over:
            self._early.note(operator, func, args, kwargs, out)
        return out

    def _by_zeros(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any,
        roles: Roles, states: Any,
    ) -> Layout | None:  # fmt: skip
        """A product in which samples interact by its shapes, but not by its values."""
        if operator.name not in ZEROS or not isinstance(states, (Additive, Mixed)):
            return None
        if self._repeats.trying:  # a guard would remember the zeros of what comes to nothing
            return None
        n = self._states.n or 0
        found = separate_by_zeros(operator, args, kwargs, out, roles.coloured, n)
        if found is not None:
            tensors = collect([*args, *kwargs.values()])
            samples = {id(t) for t, state in roles.coloured if isinstance(state, Layout)}
            self._guards.separated_by_zeros(
                operator.name,
                [t for t in tensors if out.requires_grad and id(t) not in samples],
                out,
                masks=operator.name == "scaled_dot_product_attention",
            )
        return found

    def _derive(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
        roles: Roles,
    ) -> Any:  # fmt: skip
        """Parameters and constants only: the result is derived from parameters."""
        derived = self._marking.derived(operator, args, kwargs, roles.owned)
        random = self._repeats.random_state(operator, roles.owned)
        with kept():
            out = func(*args, **kwargs)
        result = args[0] if operator.inplace and args else out
        self._marking.derive(operator, result, kwargs, derived, roles)
        if derived.selected and (random is None or not random.changed()):
            constants = [*roles.loose, *(t for t, _ in roles.coloured)]
            self._repeats.note(operator, func, args, kwargs, out, roles.owned, constants)
        self._learn.derived(operator, func, args, kwargs, roles, out)
        return out


def _nobodys(tensor: Tensor, state: State) -> bool:
    """Whether a tensor holds constants alone (one without elements is as good as data)."""
    if isinstance(state, Layout) and state.ids is not None and state.coupled is None:
        plain = not tensor.requires_grad and tensor.numel() > 0
        return plain and bool((state.ids < 0).all())
    return isinstance(state, Constant)
