"""Results of repeated calls: what is known of them, until a mark is needed.

A call that was learned (``recording/program.py``) leaves a line here. Most results are asked for by
the next learned call alone, which compares the line; a mark in the table would cost more than that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from ..layouts import Additive, Layout
from .marks import Derived


class Known:
    """What every repetition of a call makes: the state of one of its results.

    ``aliasing``: it may share memory with its source; ``detached``: it does so without being a
    view. ``plain_bytes``: what a plain step holds where it is the losses, once that was found out.
    """

    __slots__ = ("aliasing", "batches", "detached", "grad", "plain_bytes", "state")

    def __init__(
        self, state: Layout | Additive | Derived, batches: int, grad: bool, *, aliasing: bool,
        detached: bool,
    ) -> None:  # fmt: skip
        self.state, self.batches, self.grad = state, batches, grad
        self.aliasing, self.detached = aliasing, detached
        self.plain_bytes: int | None = None


# the tensor, its version when it was made, what is known of it, and what it may share memory with
Line = tuple[Callable[[], Tensor | None], int, Known, "weakref.ref[Tensor] | None"]


class Results:
    """The lines of one recording, in order; the first ``marked`` of them have marks.

    ``plain`` are the places of those without a gradient history. Constants have none, and are
    looked for among these alone.
    """

    __slots__ = ("each", "marked", "plain")

    def __init__(self) -> None:
        self.each: list[Line] = []
        self.plain: list[int] = []
        self.marked = 0

    def add(self, line: Line) -> None:
        """A result was made."""
        if not line[2].grad:
            self.plain.append(len(self.each))
        self.each.append(line)

    def unmarked(self) -> list[Line]:
        """Lines without a mark; from now on they have one."""
        found, self.marked = self.each[self.marked :], len(self.each)
        return found

    def find(self, tensor: Tensor) -> Line | None:
        """The line of a tensor that has no mark yet."""
        places = range(len(self.each)) if tensor.requires_grad else self.plain
        for at in reversed(places):
            if at < self.marked:
                break
            if self.each[at][0]() is tensor:
                return self.each[at]
        return None

    def known_of(self, tensor: Tensor) -> Known | None:
        """What every repetition knows of a tensor, whether it has a mark or not."""
        return next((line[2] for line in reversed(self.each) if line[0]() is tensor), None)

    def clear(self) -> None:
        """Forget them."""
        self.each.clear()
        self.plain.clear()
        self.marked = 0
