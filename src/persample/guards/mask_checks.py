"""Constants that alone keep samples separate: they must also do so in backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import Place
from ..uses.context import Context
from .messages import not_finite_at_zeros


class Zeros:
    """Where constants were zero, or masks closed, that alone kept samples separate.

    Backward reads the constants again: a sample would be given gradients of another.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, Tensor, bool]] = []
        self._any = False

    def __bool__(self) -> bool:
        return self._any

    def note(self, constants: Iterable[Tensor], *, masks: bool) -> None:
        """These kept samples separate; torch keeps masks of truth values as numbers of its own."""
        self._any = True
        for tensor in constants:
            if tensor.dtype != torch.bool:
                self._seen.append((tensor, _open(tensor, masks=masks), masks))

    def changed(self) -> bool:
        """Whether one of them keeps others separate now."""
        return not all(
            torch.equal(_open(tensor, masks=masks), before) for tensor, before, masks in self._seen
        )

    def clear(self) -> None:
        """Forget them."""
        self._seen.clear()


def _open(tensor: Tensor, *, masks: bool) -> Tensor:
    value = tensor.detach()
    return value > torch.finfo(value.dtype).min / 2 if masks else value != 0


class Finite:
    """A hook on a product whose zeros keep samples separate, before code of the user's own.

    That may make numbers of what another sample's overflow has left.
    """

    __slots__ = ("_context", "_operator", "_place")

    def __init__(self, context: weakref.ref[Context], operator: str, place: Place | None) -> None:
        self._context, self._operator, self._place = context, operator, place

    def __call__(self, made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        """Gradients came to the product, and left it."""
        context = self._context()
        if context is None or not context.backward.receiving:
            return
        if not all(g is None or bool(g.isfinite().all()) for g in (*made, *given)):
            context.backward.refuse(not_finite_at_zeros(self._operator, self._place))
