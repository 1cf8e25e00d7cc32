"""What made persample refuse models of other packages without need: one small program per cause.

A row says what it is today; a test fails when that is no longer true, also when it has become
better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .subject import N, Row, Subject, squares

NEEDLESS = "refused needlessly"


@dataclass(frozen=True, slots=True)
class Cause:
    """A program, its outcome today, and (where it is refused) a word of the fix.

    ``follow`` does what the fix says: the program is exact then.
    """

    row: Row
    today: str
    fix: str = ""
    follow: Callable[[Subject], None] | None = None

    def followed(self) -> Row:
        """The same program after the fix."""

        def build() -> Subject:
            made = self.row.build()
            assert self.follow is not None
            self.follow(made)
            return made

        return Row(self.row.package, self.row.module, self.row.name, build)


CAUSES: list[Cause] = []


def cause(
    name: str, today: str = "exact", fix: str = "", follow: Callable[[Subject], None] | None = None
) -> Callable[[Any], Any]:
    """Register a builder of a subject."""

    def add(build: Callable[[], Subject]) -> Callable[[], Subject]:
        CAUSES.append(Cause(Row("torch", "torch", name, build), today, fix, follow))
        return build

    return add


def loop(made: Subject) -> None:
    """``record(..., unproven="loop")``."""
    before = made.options
    made.options = lambda batch: {**before(batch), "unproven": "loop"}


def mark(made: Subject) -> None:
    """``tape.mark(x)`` before the model is called."""
    made.prepare = lambda tape, batch: tape.mark(batch)


def mark_all(made: Subject) -> None:
    """``record(..., n=...)`` and ``tape.mark(batch)`` before pieces of it are taken."""
    mark(made)
    made.options = lambda batch: {"n": len(batch)}


def loop_of_all(made: Subject) -> None:
    """``record(..., n=4, unproven="loop")``."""
    made.options = lambda batch: {"n": N, "unproven": "loop"}


def name_it(made: Subject) -> None:
    """``record(..., constants=("table",))``."""
    made.options = lambda batch: {"constants": (1,)}


def subject(model: nn.Module, *batch: Any, **more: Any) -> Subject:
    """A model whose outputs are squared."""
    more.setdefault("loss", squares)
    return Subject(model, batch=batch, **more)
