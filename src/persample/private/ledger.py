"""What has been spent: steps, counted before anybody can see their update."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ledger:
    """The steps of this run and of those that it was forked from.

    Attributes:
        steps: Steps of the plan that were begun to be released; the next one has this number.
        elsewhere: Steps of other branches, which go on from a checkpoint that this one forked:
            each counts to the end of the plan.
    """

    steps: int = 0
    elsewhere: int = 0

    @property
    def spent(self) -> int:
        """The number of steps that the accountant composes."""
        return self.steps + self.elsewhere

    def count(self) -> None:
        """One more."""
        self.steps += 1

    def fork(self, planned: int) -> None:
        """From here on there are two branches: the other may be trained to the plan's end."""
        self.elsewhere += planned - self.steps
