"""What is done with each use's gradients while a backward pass runs; the simplest keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

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


class Kept(Consumer):
    """The contributions of all passes; ``changes`` counts how often they became others."""

    def __init__(self) -> None:
        self.contributions: list[Contribution] = []
        self.changes = 0
        self._before = 0

    def begin(self) -> None:
        """A backward pass begins."""
        self._before = len(self.contributions)

    def take(self, contribution: Contribution, parts: Parts) -> None:
        """Keep it as small as can be."""
        contribution.keep()
        self.contributions.append(contribution)
        self.changes += 1

    def latest(self) -> list[Contribution]:
        """What the last pass brought."""
        return self.contributions[self._before :]

    def rollback(self) -> None:
        """The pass failed: forget what it brought."""
        del self.contributions[self._before :]
        self.changes += 1

    def clear(self) -> None:
        """Forget everything."""
        self.contributions.clear()
        self.changes += 1


class Looped(Consumer):
    """Rows of a recording whose losses were back-propagated one by one: nothing comes by taps."""

    def __init__(self, rows: dict[str, Tensor]) -> None:
        self.rows = rows

    def clear(self) -> None:
        """Forget everything."""
        self.rows.clear()
