"""Numbers that code takes out of tensors in backward.

A gradient that a hook or a custom function scales by such a number has been scaled by something of
the whole batch, and nothing shows it: a norm for clipping, the result of ``if grad.isnan().any()``,
an array of numpy's. Code that only looks (logging) changes no gradient and is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import Place, describe, here
from ..layouts.layout import Additive, Layout, Mixed
from ..run_state import equal
from ..uses.context import Context
from ..uses.tensor_states import TensorStates, version

# Calls that hand out memory: what is written there leaves no trace.
_MEMORY = frozenset(
    "numpy __array__ __dlpack__ data_ptr const_data_ptr storage untyped_storage".split()
)


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
    """Where the running backward pass let numbers of samples leave torch."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.begin()

    def begin(self) -> None:
        """A new backward pass."""
        self.running: list[Received] = []  # what hooks and custom functions were given
        self.seen, self._name = False, ""
        self._place: Place | None = None

    def note(self, name: str, args: Sequence[Any]) -> None:
        """A call hands out numbers."""
        if name in _MEMORY:
            with torch._C.DisableTorchFunction():
                for received in self.running:
                    received.keep()
        if name in ("storage", "untyped_storage"):  # asked for sizes and identity, as a rule
            return
        if self.seen or self._context.n == 1 or self._forward_again():
            return
        for value in args:
            if isinstance(value, Tensor) and isinstance(
                self._context.look(value), (Layout, Additive, Mixed)
            ):
                self.hide(name)
                return

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
