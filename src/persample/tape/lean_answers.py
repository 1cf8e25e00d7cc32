"""A source that keeps nothing: answers of the first pass, and further passes for the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from ..backward.consumers.lean import Lean
from ..backward.passes import Passes
from ..errors import UsageError
from ..forms import Form
from ..guards.guards import Guards
from ..uses.context import Context
from .parameter_forms import expect_backward
from .source import Forms, Grads, Lengths, Source, Visitor


class LeanAnswers(Source):
    """Answers of a lean recording."""

    def __init__(self, context: Context, lean: Lean, passes: Passes, guards: Guards) -> None:
        self._context, self._lean = context, lean
        self._passes, self._guards = passes, guards

    keeps = False

    def ready(self) -> None:
        """Refuse to answer from a recording that is not complete, or no longer true."""
        self._guards.expect_true(())
        expect_backward(self._context)

    def norms(self, names: Iterable[str], *, separate: bool) -> Lengths:
        """Norms of every parameter that received a gradient, from the first pass."""
        self.ready()
        return self.clipping_norms(names, None)

    def clipping_norms(self, names: Iterable[str], forms: Forms | None) -> Lengths:
        """The same."""
        kept = self._lean.norms
        return {name: kept[name] for name in names if name in kept}

    @contextlib.contextmanager
    def clipping_forms(self, names: Iterable[str], *, separate: bool) -> Iterator[Forms | None]:
        """Nothing is kept."""
        yield None

    def forms(self, names: Iterable[str]) -> dict[str, Form]:
        """Nothing is kept."""
        self.ready()
        raise nothing_kept()

    def each(self, names: Sequence[str], visit: Visitor, *, linear: bool, last: bool) -> None:
        """One more backward pass; the ``last`` question frees the graph."""
        self.ready()
        self._guards.expect_true((), self._lean.operands.values())
        self._passes.revisit(set(names), visit, linear=linear, last=last)

    def found_grads(self, names: Sequence[str]) -> Grads | None:
        """Rows that the first pass wrote out, given away."""
        lean = self._lean
        if not lean.ahead.grads or not lean.given.isdisjoint(names):
            return None
        self.ready()
        return dict(lean.handed(names))

    def found_dots(self, direction: Mapping[str, Tensor], names: Sequence[str]) -> Grads | None:
        """⟨gᵢ, V⟩ of parameters, if the first pass took them with this very direction."""
        if not self._lean.knows(direction, names):
            return None
        self.ready()
        kept = self._lean.dots
        return {name: kept[name] for name in names if name in kept}

    def found_projections(self, wanted: tuple[int, int]) -> list[Tensor] | None:
        """Projections (dim, seed), if the first pass took them."""
        if self._lean.ahead.projection != wanted:
            return None
        self.ready()
        return self._lean.projections

    def found_moments(self) -> tuple[Grads, Grads, Grads] | None:
        """Sums, sums of squares and variances, if the first pass took them."""
        lean = self._lean
        if not lean.ahead.moments:
            return None
        self.ready()
        return lean.sums, lean.squares, lean.variances


def nothing_kept() -> UsageError:
    """A question that needs more than one gradient at a time."""
    return UsageError(
        "a lean recording keeps no gradients",
        why="positions() needs both factors of every use, and cross() those of one of two tapes",
        fix="record(model) without lean=True",
    )
