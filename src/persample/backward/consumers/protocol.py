"""What is done with the gradients of each use while a backward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...forms import Form
from ..contribution import Contribution

Parts = Callable[[Contribution], list[tuple[str, Form]]]


class Consumer:
    """Takes one contribution after another: keeps it, streams it, or writes it out.

    A method that a consumer leaves out does nothing.
    """

    def expect(self, names: Iterable[str]) -> None:
        """A use of these parameters was recorded in forward."""

    def begin(self) -> None:
        """A backward pass begins."""

    def take(self, contribution: Contribution, parts: Parts) -> None:
        """One use's gradients; ``parts`` gives those of the parameters behind its operand."""

    def finish(self) -> None:
        """The pass is over, and nothing was wrong with it."""

    def rollback(self) -> None:
        """The pass failed: forget what it brought."""

    def clear(self) -> None:
        """Forget everything."""
