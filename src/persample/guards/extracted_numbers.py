"""Numbers that code takes out of tensors: ``.item()``, ``float()``, lists, arrays, branches.

What is computed with such a number depends on the samples that it was taken from, and nothing shows
it. In backward, a gradient that a hook or a custom function changes after one was taken (a norm for
clipping, the result of ``if grad.isnan().any()``) is refused. In forward, every one that depends on
several samples is noted; a real number that was taken before the losses were computed may be in
them. Code that only looks (logging) changes nothing and is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import Place, Reason, describe, here
from ..layouts import Additive, Earlier, Layout, Mixed, State
from ..run_state import equal
from ..uses import Context, Derived, TensorStates, innermost, transformed, version

# Calls that hand out memory: what is written there leaves no trace.
_MEMORY = frozenset(
    "numpy __array__ __dlpack__ data_ptr const_data_ptr storage untyped_storage".split()
)
# In forward: calls that hand out values, and those whose values are sizes or comparisons of all
# elements. What is printed is not computed with; the size of a result tells how rows were chosen.
_TRANSFORM = "torch.func"
_VALUES = frozenset(
    """item tolist numpy __array__ __dlpack__ __float__ __complex__ __bool__ __nonzero__ is_nonzero
    __deepcopy__ __reduce_ex__ _make_dual""".split()
) | {_TRANSFORM}
_SIZES = frozenset("__int__ __long__ __index__ __contains__ allclose equal".split())
_WHY = "a number of several samples left torch; what is computed with it depends on all of them"
_FIX = "compute with it in torch, or take it after the losses"


class Taken(NamedTuple):
    """A number that left torch in forward; ``at``: nodes of the graph made later have no less.

    ``real``: a real value, a comparison of one, or a count: not a size, and not what integers and
    masks say, by which rows are routed.
    """

    reason: Reason
    at: int
    real: bool


class Received:
    """Gradients that some code was given, to be distinguished from what it makes of them."""

    __slots__ = ("_copies", "_grads", "handed_out")

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self._grads = [(grad, version(grad)) for grad in grads if grad is not None]
        self._copies: list[Tensor] | None = None
        self.handed_out: list[Tensor] = []  # by ``.data``, which counts writes for itself

    def keep(self) -> None:
        """Their memory is handed out: keep what is in it now."""
        if self._copies is None:
            self._copies = [grad.clone() for grad, _ in self._grads]

    def written(self, marks: TensorStates) -> bool:
        """Whether they were written to past torch, or samples were mixed by ``.data``."""
        for tensor in self.handed_out:
            mark = marks.get(tensor)
            if mark is None or mark.family.epoch or not isinstance(mark.state, Layout):
                return True
        pairs = zip(self._grads, self._copies or (), strict=False)
        return any(not equal(grad, before) for (grad, _), before in pairs)

    def holds(self, grad: Tensor) -> bool:
        """Whether this gradient is one of them, and it was not written to."""
        return any(grad is own and version(own) == before for own, before in self._grads)


class ExtractedNumbers:
    """Where the forward, or the running backward pass, let numbers of samples leave torch."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._taken: dict[tuple[str, Place | None, bool], Taken] = {}  # in forward, by line
        self.begin()

    def begin(self) -> None:
        """A new backward pass."""
        self.running: list[Received] = []  # what hooks and custom functions were given
        self._context.user_code.returning.clear()
        self.seen, self._name = False, ""
        self._place: Place | None = None

    def note(self, name: str, args: Sequence[Any]) -> None:
        """A call hands out numbers."""
        if not self._context.backward.busy:
            if name in _VALUES or name in _SIZES:
                with torch._C.DisableTorchFunction():
                    self._note_in_forward(name, args)
            return
        if name in _MEMORY:
            with torch._C.DisableTorchFunction():
                for received in self.running:
                    received.keep()
        if name in ("storage", "untyped_storage"):  # asked for sizes and identity, as a rule
            return
        if self.seen or self._context.n == 1 or self._forward_again():
            return
        states = [self._context.look(value) for value in args if isinstance(value, Tensor)]
        if any(isinstance(state, (Layout, Additive, Mixed)) for state in states):
            self.hide(name)

    # ------------------------------------------------------------------ forward

    def _note_in_forward(self, name: str, args: Sequence[Any]) -> None:
        for value in args:
            if not isinstance(value, Tensor):
                continue
            stands = transformed(value) and self._context.states.table.get(id(value))
            state = stands.state if stands else self._context.look(innermost(value))
            if not _of_several(state, self._context.n or 0):
                continue
            real = _is_real(name, value, state)
            at, place = torch._C._autograd._get_sequence_nr(), here()
            reason = Reason(name.strip("_"), _WHY, (tuple(value.shape),), place, _FIX)
            self._taken.setdefault((name, place, real), Taken(reason, at, real))
            return

    def note_transformed(self, tensors: Sequence[Tensor]) -> None:
        """A call inside a torch.func transform: what it makes of samples comes out unmarked."""
        with torch._C.DisableTorchFunction():
            self._note_in_forward(_TRANSFORM, tensors)

    def before(self, losses: Tensor) -> Reason | None:
        """A real number that was taken before the losses were computed, if there is one."""
        if not self._taken:
            return None
        with torch._C.DisableTorchFunction():
            node = losses.grad_fn
        if node is None:
            return None
        last = node._sequence_nr()  # the newest node of their graph
        return next((t.reason for t in self._taken.values() if t.real and t.at <= last), None)

    def listed(self) -> list[str]:
        """All that were taken in forward: where, and what they can be."""
        return [
            f"{t.reason.where()} ({'a value' if t.real else 'a size or a choice of rows'})"
            for t in self._taken.values()
        ]

    # ------------------------------------------------------------------ backward

    def hand_out(self, tensor: Tensor) -> None:
        """``.data`` of a tensor with samples."""
        for received in self.running:
            received.handed_out.append(tensor)

    def hide(self, name: str) -> None:
        """Something takes tensors to where their samples cannot be followed."""
        if not self.seen and not self._forward_again():
            self.seen, self._name, self._place = True, name, here()

    def _forward_again(self) -> bool:
        """Checkpointing: gradients are enabled, and neither hook nor custom function runs."""
        return torch.is_grad_enabled() and not self.running

    def why(self) -> str:
        """Why a gradient that was changed cannot be trusted."""
        return (
            f"numbers were taken out of tensors of all samples in backward ({self._name}, "
            f"{describe(self._place)}), and gradients were changed there or later"
        )


def _is_real(name: str, value: Tensor, state: State | Derived | None) -> bool:
    """Whether a number is a value to compute with; else a size, or a choice of rows."""
    if isinstance(state, Additive) and value.numel() == 1:  # a count is a divisor, as a rule
        return name in _VALUES or name == "__int__"
    real = value.is_floating_point() or value.is_complex()
    return name in _VALUES and (real or (isinstance(state, Mixed) and state.reason.real))


def _of_several(state: State | Derived | None, n: int) -> bool:
    """Whether a tensor depends on several samples of this recording."""
    if n < 2 or isinstance(state, Earlier):
        return False
    if isinstance(state, Layout) and state.ids is not None:
        owners = state.ids[state.ids >= 0]
        return bool((owners != owners[:1]).any())
    return isinstance(state, (Layout, Additive, Mixed))
