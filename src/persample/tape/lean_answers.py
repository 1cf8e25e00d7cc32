"""A source that keeps nothing: answers of the first pass, and further passes for the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from ..backward.consumers.lean import Lean
from ..backward.passes import Passes
from ..errors import UsageError
from ..forms import Form, Norms, add_norms, bound_norms, certain_sums
from ..guards.guards import Guards
from ..uses.context import Context
from .parameter_forms import expect_backward
from .source import Forms, Grads, Names, Source, Visitor


class LeanAnswers(Source):
    """Answers of a lean recording."""

    def __init__(self, context: Context, lean: Lean, passes: Passes, guards: Guards) -> None:
        super().__init__(context)
        self._lean, self._passes, self._guards = lean, passes, guards

    keeps = False

    def ready(self) -> None:
        """Refuse to answer from a recording that is not complete, or no longer true."""
        self._guards.expect_true(())
        expect_backward(self._context)

    def sq_norms(self, groups: Names) -> Tensor:
        """‖gᵢ‖² over groups of parameters, from the first pass."""
        self.ready()
        return add_norms(self._norms(groups), self.n, self.device)

    def bounds(self, groups: Names, elements: int) -> tuple[Forms | None, Tensor]:
        """Certified bounds of ‖gᵢ‖² over groups, from the first pass."""
        return None, bound_norms(self._norms(groups), self.n, self.device, elements)

    def _norms(self, groups: Names) -> list[list[Norms]]:
        kept = self._lean.norms
        return [[each for name in group for each in kept.get(name, ())] for group in groups]

    def forms(self, names: Collection[str]) -> dict[str, Form]:
        """Nothing is kept."""
        self.ready()
        raise nothing_kept()

    def each(self, names: Sequence[str], visit: Visitor, *, linear: bool, last: bool) -> None:
        """One more backward pass; the ``last`` question frees the graph."""
        self.ready()
        self._guards.expect_true((), self._lean.operands.values())
        self._passes.revisit(set(names), visit, linear=linear, last=last)

    def weighted_sums(self, names: Sequence[str], c: Tensor, *, last: bool) -> Grads:
        """Σ cᵢ gᵢ, use by use."""
        found: Grads = {}

        def visit(name: str, form: Form) -> None:
            value = form.weighted_sum(c)
            found[name] = found[name] + value if name in found else value

        self.each(names, visit, linear=True, last=last)
        return found

    def certain_sums(
        self, names: Sequence[str], forms: Forms | None, c: Grads, bad: Tensor | None
    ) -> Grads:
        """Σ cᵢ gᵢ from whole parameters, without ``bad`` samples; the graph is freed."""
        found: Grads = {}

        def visit(name: str, form: Form) -> None:
            found.update(certain_sums({name: form}, c, bad))

        self.each(names, visit, linear=False, last=True)
        return found

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
