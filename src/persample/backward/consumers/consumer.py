"""What is done with each use's gradients while a backward pass runs; the simplest keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from torch import Tensor

from ...forms import Form
from ..contribution import Contribution
from ..waiting import Waiting

Parts = Callable[[Contribution], list[tuple[str, Form]]]


class Consumer:
    """Takes one contribution after another: keeps it, streams it, or writes it out.

    A method that a consumer leaves out does nothing.
    """

    done = False  # whether it has had the only pass that it takes

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
    """The contributions of all passes; ``changes`` counts how often they became others.

    Small ones wait: ``entries`` holds what was brought, in its order.
    """

    def __init__(self) -> None:
        self.entries: list[Contribution | Waiting] = []
        self.changes = 0
        self._before = 0

    def begin(self) -> None:
        """A backward pass begins."""
        self._before = len(self.entries)

    def take(self, contribution: Contribution, parts: Parts) -> None:
        """Keep it as small as can be."""
        contribution.keep()
        self.entries.append(contribution)
        self.changes += 1

    def wait(self, waiting: Waiting) -> None:
        """Keep what a small layer's tap brought."""
        self.entries.append(waiting)
        self.changes += 1

    def finish(self) -> None:
        """What waits alone has nothing to be joined with."""
        if len(self.waiting()) == 1:
            self._settle()

    @property
    def contributions(self) -> list[Contribution]:
        """All of them: nothing waits any longer."""
        self._settle()
        return [entry for entry in self.entries if isinstance(entry, Contribution)]

    def _settle(self) -> None:
        if self.waiting():
            before, latest = expanded(self.entries[: self._before]), expanded(self.latest())
            self.entries, self._before = [*before, *latest], len(before)

    def waiting(self) -> list[Waiting]:
        """What waits."""
        return [entry for entry in self.entries if isinstance(entry, Waiting)]

    def latest(self) -> list[Contribution | Waiting]:
        """What the last pass brought."""
        return self.entries[self._before :]

    def rollback(self) -> None:
        """The pass failed: forget what it brought."""
        del self.entries[self._before :]
        self.changes += 1

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()
        self.changes += 1


def expanded(entries: Sequence[Contribution | Waiting]) -> list[Contribution]:
    """The contributions, also of what waits."""
    each = [e.contributions() if isinstance(e, Waiting) else [e] for e in entries]
    return list(chain.from_iterable(each))


class Looped(Consumer):
    """Rows of a recording whose losses were back-propagated one by one: nothing comes by taps."""

    def __init__(self, rows: dict[str, Tensor]) -> None:
        self.rows = rows

    def clear(self) -> None:
        """Forget everything."""
        self.rows.clear()
