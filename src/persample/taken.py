"""Numbers that code takes out of tensors in backward.

A gradient that a hook or a custom function scales by such a number has been scaled by something of
the whole batch, and nothing shows it: a norm for clipping, the result of ``if grad.isnan().any()``,
an array of numpy's. Code that only looks (logging) changes no gradient and is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import Place, describe, here
from .layout import Additive, Layout, Mixed
from .marks import version

if TYPE_CHECKING:
    from .recorder import Recorder


class Received:
    """Gradients that some code was given, to be told from what it makes of them."""

    __slots__ = ("_grads",)

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self._grads = [(grad, version(grad)) for grad in grads if grad is not None]

    def holds(self, grad: Tensor) -> bool:
        """Whether this gradient is one of them, and nobody wrote to it."""
        return any(grad is own and version(own) == before for own, before in self._grads)


class Taken:
    """Where the running backward pass let numbers of samples leave torch."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.begin()

    def begin(self) -> None:
        """A new backward pass."""
        self.depth = 0  # of hooks and custom functions that are running
        self.seen, self._name = False, ""
        self._place: Place | None = None

    def note(self, name: str, args: Sequence[Any]) -> None:
        """A call hands out numbers."""
        if self.seen or self._recorder.n == 1 or self._forward_again():
            return
        for value in args:
            if isinstance(value, Tensor) and isinstance(
                self._recorder.look(value), (Layout, Additive, Mixed)
            ):
                self.hide(name)
                return

    def hide(self, name: str) -> None:
        """Something takes tensors to where their samples cannot be followed."""
        if not self.seen and not self._forward_again():
            self.seen, self._name, self._place = True, name, here()

    def _forward_again(self) -> bool:
        """Checkpointing: gradients are enabled, and neither hook nor custom function runs."""
        return torch.is_grad_enabled() and not self.depth

    def why(self) -> str:
        """Why a gradient that was changed cannot be trusted."""
        return (
            f"numbers were taken out of tensors of all samples in backward ({self._name}, "
            f"{describe(self._place)}), and gradients were changed there or later"
        )
