"""Attacks by tensors that change identity: swapped, aliased, relabelled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Table,
    on_hidden,
    script,
    unseen,
)


def swapped(h: Tensor) -> Tensor:
    """Two tensor objects exchange their contents."""
    a, b = h * 1, h.T * 1
    torch.utils.swap_tensors(a, b)
    return a


def swapped_back(h: Tensor) -> Tensor:
    """Exchanged twice."""
    a, b = h * 1, h.T * 1
    torch.utils.swap_tensors(a, b)
    torch.utils.swap_tensors(a, b)
    return a


def hidden_transpose(h: Tensor) -> Tensor:
    """Transposed in place where nobody looks."""
    h = h * 1
    unseen(lambda: h.t_())
    return h * 2


def hidden_unsqueeze(h: Tensor) -> Tensor:
    """Two axes are put in place where nobody looks: (n, d) -> (1, n, d), squeezed otherwise."""
    h = h * 1
    unseen(lambda: h.unsqueeze_(0).transpose_(0, 2))
    return h.squeeze(2)


@script
def scripted_transpose(h: Tensor) -> Tensor:
    """In place, by TorchScript."""
    return h.t_()


def jit_in_place(h: Tensor) -> Tensor:
    """The same object, transposed by TorchScript."""
    h = h * 1
    scripted_transpose(h)
    return h * 2


class Named(torch.Tensor):
    """A subclass that adds nothing."""


class Flipping(torch.Tensor):
    """A subclass whose every call also reverses the samples."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Tensor) and out.dim() == 2 and func is torch.Tensor.mul:
            with torch._C.DisableTorchFunction():
                return out.flip(0)
        return out


def strides_exchanged(h: Tensor) -> Tensor:
    """A tensor whose memory is transposed, read in the order of memory."""
    return h.T.contiguous().T.as_strided((N, N), (N, 1))


def saved_self(h: Tensor) -> Tensor:
    """A tensor taken out of the graph."""
    return (h * h).grad_fn._saved_self.T * 2


def user_base(h: Tensor) -> Tensor:
    """The base of a view of a transpose."""
    return (h.T * 1)[:]._base


TRICKS: Table = {
    "swap_tensors": (REFUSED, swapped),
    "swap_tensors twice": (EITHER, swapped_back),
    "transposed unseen": (REFUSED, hidden_transpose),
    "axes unseen": (REFUSED, hidden_unsqueeze),
    "transposed by jit": (REFUSED, jit_in_place),
    "subclass": (EITHER, lambda h: h.as_subclass(Named) * 2),
    "subclass, transposed": (REFUSED, lambda h: h.as_subclass(Named).T * 2),
    "subclass that reverses": (REFUSED, lambda h: h * (h.as_subclass(Flipping) * 2)),
    "order of memory": (REFUSED, strides_exchanged),
    "order of memory by set_": (
        EITHER,
        lambda h: (
            h
            * torch.empty(0)
            .double()
            .set_(h.detach().T.contiguous().untyped_storage(), 0, (N, N), (N, 1))
        ),
    ),
    "saved by the graph": (REFUSED, saved_self),
    "base of a view": (REFUSED, user_base),
    "channels last": (
        EXACT,
        lambda h: h.view(N, 2, 2, 1).contiguous(memory_format=torch.channels_last).flatten(1),
    ),
    "requires_grad is asked": (EXACT, lambda h: h * (2 if h.requires_grad else 3)),
    "grad_fn is asked": (EXACT, lambda h: h * (2 if (h * 1).grad_fn is not None else 3)),
    "is_leaf is asked": (EXACT, lambda h: h * (2 if h.is_leaf else 3)),
    "detach_": (EITHER, lambda h: h * (h * 2).detach_().flip(0)),
    "requires_grad_ anew": (EITHER, lambda h: h * h.detach().flip(0).requires_grad_()),
    "view of a detached": (EITHER, lambda h: h * h.detach().T.reshape(N, N)),
    "contiguous strides of a column": (
        REFUSED,
        lambda h: torch.as_strided(h, (N,), (N,), 0).repeat(2).view(N, 2),
    ),
    "memory of one sample": (REFUSED, lambda h: h * torch.as_strided(h, (N, N), (0, 1), N)),
}


def cases() -> Iterator[Case]:
    """All of this file."""
    return on_hidden("trick", TRICKS)
