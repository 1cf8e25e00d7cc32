"""What is known of the backward passes of a recording: of the one that runs, and of all so far."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from ..errors import PersampleError, Reason


class PassState:
    """Set by whoever runs a backward pass; read by taps, hooks and custom functions in it."""

    def __init__(self) -> None:
        # the pass that runs
        self.receiving = False  # taps are listened to
        self.muted = False  # taps may fire without being listened to
        self.factor = 1.0  # what gradients are multiplied by, to undo a loss scale
        self.retain = True  # whether the graph is kept for another pass
        self.trouble: PersampleError | None = None  # why the answers cannot be trusted
        # all passes so far
        self.count = 0
        self.scalar = False  # one number was back-propagated, not one loss per sample
        self.ordered = False  # loss i is sample i's
        self.coupled: Reason | None = None  # what scales the losses by a number of the whole batch
        self.extracted: Reason | None = None  # a number that left torch before the losses
        self.apart = True  # samples were proven separate, also where each loss had its own pass
        self.reference: list[Tensor | None] = []  # autograd's gradients of weighted losses
        self.strict = False  # a backward pass from elsewhere raises at once

    @property
    def busy(self) -> bool:
        """Whether a backward pass of this recording runs."""
        return self.receiving or self.muted

    def refuse(self, error: PersampleError) -> None:
        """Note why the answers cannot be trusted; the first reason counts."""
        self.trouble = self.trouble or error

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """A pass whose gradients are not wanted: taps fire, and are not listened to."""
        before, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = before
