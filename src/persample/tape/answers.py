"""Where answers come from: every parameter's form, made on demand; or further backward passes.

A lean recording keeps nothing but the answers of its first pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from torch import Tensor

from ..backward.collector import Collector
from ..backward.consumers.consumer import Kept, Looped
from ..backward.consumers.lean import Lean
from ..backward.contribution import Contribution
from ..backward.kept_forms import KeptForms
from ..backward.passes import Passes
from ..errors import UsageError
from ..forms import LITTLE, SHARE, Form, Norms, add_norms, bound_norms, certain_sums
from ..guards.guards import Guards
from ..uses import Context
from .question import Forms, Grads, Names, Question, Visitor


def expect_backward(context: Context) -> None:
    """Refuse a question that nothing was back-propagated for."""
    if not context.backward.count:
        raise UsageError(
            "no backward pass was recorded",
            fix="call tape.backward(losses) with one loss per sample",
        )


class ParameterForms(Question):
    """A recording that kept every use's form (or, of a loop, the rows)."""

    keeps = True

    def __init__(self, context: Context, collector: Collector, guards: Guards) -> None:
        super().__init__(context)
        self._collector, self._guards = collector, guards
        self._forms = KeptForms(collector)
        self._gradients = self._forms.gradients

    @property
    def contributions(self) -> list[Contribution]:
        """What was kept of each use."""
        consumer = self._collector.consumer
        return consumer.contributions if isinstance(consumer, Kept) else []

    @property
    def looped(self) -> bool:
        """Whether each loss had a pass of its own."""
        return isinstance(self._collector.consumer, Looped)

    def ready(self) -> None:
        """Refuse to answer from a recording that is not complete, or no longer true."""
        consumer = self._collector.consumer
        self._guards.expect_true(consumer.entries if isinstance(consumer, Kept) else [])
        expect_backward(self._context)

    def forms(self, names: Collection[str]) -> dict[str, Form]:
        """One form per parameter that received a gradient."""
        return self._gradients.forms(names, self._uses(names))

    def written(self, names: Collection[str]) -> dict[str, Form]:
        """Forms whose rows will be looked at: what lies behind derived tensors is written out."""
        return self._gradients.written(names, self._uses(names))

    def _uses(self, names: Iterable[str]) -> dict[str, list[Form]]:
        """What is true of parameters that were not asked for before."""
        self.ready()
        self._guards.expect_values(behind=self._collector.behind)
        return self._forms.uses(names)

    def _joined(
        self, groups: Names, *, ready: bool = False
    ) -> tuple[dict[str, list[Form]], dict[str, Form]]:
        """The same, with small layers joined where there is one group."""
        if not ready:
            self.ready()
        self._guards.expect_values(behind=self._collector.behind)
        if len(groups) == 1:
            return self._forms.joined(groups[0])
        return self._forms.uses(chain.from_iterable(groups)), {}

    def sq_norms(self, groups: Names) -> Tensor:
        """‖gᵢ‖² over groups of parameters: (groups, n)."""
        return self._gradients.sq_norms(groups, *self._joined(groups), self.n, self.device)

    def bounds(self, groups: Names, elements: int) -> tuple[Forms | None, Tensor]:
        """Forms for one sum, rows where that is cheaper, and bounds of ‖gᵢ‖² over groups."""
        return self._gradients.bounds(
            groups, *self._joined(groups, ready=True), self._room,
            counted=self._context.options.rows is not None,
            n=self.n, device=self.device, elements=elements,
        )  # fmt: skip

    def held(self) -> int:
        """Bytes of what the forms hold: several may hold the same output gradient."""
        forms = [contribution.form for contribution in self.contributions]
        storages = [t.untyped_storage() for form in forms for t in form.tensors()]
        shared = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(shared.values()) + sum(form.nbytes() for form in forms if not form.tensors())

    def _room(self, wanted: int) -> int:
        """Bytes of rows that may be kept: as granted, or up to a fifth more than a plain step.

        Where it is not known what a plain step holds, the tape holds about as much.
        """
        granted = self._context.options.rows
        if granted is not None or wanted <= LITTLE:
            return wanted if granted is None else granted
        held = self.held()
        plain = self._context.backward.plain_bytes or held
        return plain + plain // SHARE - held

    def weighted_sums(self, names: Sequence[str], c: Tensor, *, last: bool) -> Grads:
        """Σ cᵢ gᵢ of parameters that received a gradient."""
        return self._gradients.weighted_sums(names, *self._joined([names]), c)

    def certain_sums(
        self, names: Sequence[str], forms: Forms | None, c: Grads, bad: Tensor | None
    ) -> Grads:
        """Σ cᵢ gᵢ from what bounds came from, without ``bad`` samples."""
        return certain_sums(forms or {}, c, bad)

    def each(
        self, names: Sequence[str], visit: Visitor, *, linear: bool = False, last: bool = False
    ) -> None:
        """Show the form of every parameter that received a gradient to a visitor."""
        for name, form in (self.forms if linear else self.written)(names).items():
            visit(name, form)


class LeanAnswers(Question):
    """Answers of a lean recording."""

    keeps = False

    def __init__(self, context: Context, lean: Lean, passes: Passes, guards: Guards) -> None:
        super().__init__(context)
        self._lean, self._passes, self._guards = lean, passes, guards

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
        raise UsageError(
            "a lean recording keeps no gradients",
            why="positions() needs both factors of every use, and cross() those of one of two "
            "tapes",
            fix="record(model) without lean=True",
        )

    def each(
        self, names: Sequence[str], visit: Visitor, *, linear: bool = False, last: bool = False
    ) -> None:
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
