"""Keep every use's form: any question can be answered later."""

from __future__ import annotations

from torch import Tensor

from ..contribution import Contribution
from .protocol import Consumer, Parts


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
