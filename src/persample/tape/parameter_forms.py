"""Every parameter's form, made on demand, and whether it may be trusted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from torch import Tensor

from ..backward.collector import Collector
from ..backward.consumers.kept import Kept, Looped
from ..backward.contribution import Contribution
from ..backward.kept_forms import KeptForms
from ..errors import UsageError
from ..forms import Form, certain_sums
from ..guards.guards import Guards
from ..uses.context import Context
from .source import Forms, Grads, Names, Source, Visitor

SHARE = 4  # the tape holds about what a plain step holds: a quarter more is kept at most
LITTLE = 1 << 20  # bytes of rows that are not worth counting


def expect_backward(context: Context) -> None:
    """Refuse a question that nothing was back-propagated for."""
    if not context.backward.count:
        raise UsageError(
            "no backward pass was recorded",
            fix="call tape.backward(losses) with one loss per sample",
        )


class ParameterForms(Source):
    """A source that kept every use's form (or, of a loop, the rows)."""

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
        kept = self.contributions
        self._guards.expect_true(kept)
        expect_backward(self._context)

    def forms(self, names: Collection[str]) -> dict[str, Form]:
        """One form per parameter that received a gradient."""
        return self._gradients.forms(names, self._uses(names))

    def written(self, names: Collection[str]) -> dict[str, Form]:
        """Forms whose rows will be looked at: what lies behind derived tensors is written out."""
        return self._gradients.written(names, self._uses(names))

    def _uses(self, names: Iterable[str], *, ready: bool = False) -> dict[str, list[Form]]:
        """What is true of parameters that were not asked for before."""
        if not ready:
            self.ready()
        self._guards.expect_values(behind=self._collector.behind)
        return self._forms.uses(names)

    def sq_norms(self, groups: Names) -> Tensor:
        """‖gᵢ‖² over groups of parameters: (groups, n)."""
        uses = self._uses(chain.from_iterable(groups))
        return self._gradients.sq_norms(groups, uses, self.n, self.device)

    def bounds(self, groups: Names, elements: int) -> tuple[Forms | None, Tensor]:
        """Forms for one sum, rows where that is cheaper, and bounds of ‖gᵢ‖² over groups."""
        return self._gradients.bounds(
            groups, self._uses(chain.from_iterable(groups), ready=True), self._room,
            counted=self._context.options.rows is not None,
            n=self.n, device=self.device, elements=elements,
        )  # fmt: skip

    def held(self) -> int:
        """Bytes of what the forms hold: several may hold the same output gradient."""
        shared: dict[int, int] = {}
        own = 0
        for contribution in self.contributions:
            tensors = contribution.form.tensors()
            if not tensors:
                own += contribution.form.nbytes()
            for tensor in tensors:
                storage = tensor.untyped_storage()
                shared[storage.data_ptr()] = storage.nbytes()
        return own + sum(shared.values())

    def _room(self, wanted: int) -> int:
        """Bytes of rows that may be kept: as granted, or a share of what is held anyway."""
        granted = self._context.options.rows
        if granted is not None:
            return granted
        return wanted if wanted <= LITTLE else self.held() // SHARE

    def weighted_sums(self, names: Sequence[str], c: Tensor, *, last: bool) -> Grads:
        """Σ cᵢ gᵢ of parameters that received a gradient."""
        return self._gradients.weighted_sums(names, self._uses(names), c)

    def certain_sums(
        self, names: Sequence[str], forms: Forms | None, c: Grads, bad: Tensor | None
    ) -> Grads:
        """Σ cᵢ gᵢ from what bounds came from, without ``bad`` samples."""
        return certain_sums(forms or {}, c, bad)

    def each(self, names: Sequence[str], visit: Visitor, *, linear: bool, last: bool) -> None:
        """Show the form of every parameter that received a gradient to a visitor."""
        for name, form in (self.forms if linear else self.written)(names).items():
            visit(name, form)
