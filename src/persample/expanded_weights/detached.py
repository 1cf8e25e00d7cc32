"""The caller's tensors as the module gets them: their values, with a history of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class Detached:
    """Inputs that require gradients, and what stands in for them inside the recorded part.

    ``leaves`` collect the gradients of ``outer``. A module may write to an input that has a
    history: it gets such a one, too, and what it wrote is the caller's tensor afterwards.
    """

    def __init__(self, *, writable: bool) -> None:
        self.writable = writable
        self.outer: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.given: list[Tensor] = []
        self._nodes: list[Any] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        """The stand-in of an input; itself if it requires no gradient."""
        if not tensor.requires_grad:
            return tensor
        for known, given in zip(self.outer, self.given, strict=True):
            if known is tensor:
                return given
        leaf = tensor.detach().requires_grad_()
        given = Inward.apply(leaf) if self.writable and not tensor.is_leaf else leaf
        self.outer.append(tensor)
        self.leaves.append(leaf)
        self.given.append(given)
        self._nodes.append(given.grad_fn)
        return given

    def written(self) -> list[tuple[Tensor, Tensor]]:
        """The caller's tensors that have been written to, and their stand-ins."""
        every = zip(self.outer, self.given, self._nodes, strict=True)
        return [(outer, given) for outer, given, node in every if given.grad_fn is not node]


class Inward(torch.autograd.Function):
    """The values of a leaf as a tensor that may be written to."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """The same memory."""
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Straight to the leaf."""
        return grad


class Rewritten(torch.autograd.Function):
    """A tensor whose memory holds other values already: gradients go where those came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        """The tensor itself, with a new history."""
        ctx.mark_dirty(tensor)
        ctx.part = tensor._is_view()
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Nothing is left of what it was."""
        # with None for a part of a tensor, torch would drop the gradient of the other parts
        return torch.zeros_like(grad) if ctx.part else None, grad


def rewrite(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor the history of what was written to its memory; the write has been counted."""
    with _unsafe_preserve_version_counter(tensor):
        Rewritten.apply(tensor, value)
