"""Every parameter's form, made on demand, and whether it may be trusted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from ..backward.collector import Collector
from ..backward.consumers.kept import Kept, Looped
from ..backward.contribution import Contribution
from ..backward.kept_forms import KeptForms
from ..errors import UsageError
from ..forms import Form, kept_rows, norms_of, pull_back_together, scratch, stack_forms, within
from ..guards.guards import Guards
from ..uses.context import Context
from .source import Forms, Lengths, Source, Visitor

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
        self._context, self._collector, self._guards = context, collector, guards
        self._forms = KeptForms(collector)

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

    def forms(self, names: Iterable[str]) -> dict[str, Form]:
        """One form per parameter that received a gradient."""
        self.ready()
        self._guards.expect_values(behind=self._collector.behind)
        return self._forms.get(names)

    def written(self, names: Iterable[str]) -> dict[str, Form]:
        """Forms whose rows will be looked at: what lies behind derived tensors is written out."""
        forms = self.forms(names)
        if not self.looped:
            found = pull_back_together(forms)
            self._forms.replace(found)
            forms |= found
        return forms

    @contextlib.contextmanager
    def clipping_forms(self, names: Iterable[str], *, separate: bool) -> Iterator[Forms | None]:
        """Forms for norms and one sum, rows where that is cheaper."""
        forms = self.written(names)
        rows = kept_rows(forms, self._room)
        used = sum(form.nbytes() for form in rows.values())
        forms |= rows
        with within(scratch() if self._context.options.rows is None else scratch() - used):
            yield forms if separate else stack_forms(forms)

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

    def norms(self, names: Iterable[str], *, separate: bool) -> Lengths:
        """Norms to be added up; ``separate``: of every parameter that received a gradient."""
        forms: Forms = self.written(names)
        return self.clipping_norms(names, forms if separate else stack_forms(forms))

    def clipping_norms(self, names: Iterable[str], forms: Forms | None) -> Lengths:
        """Norms of :meth:`clipping_forms` forms."""
        assert forms is not None
        return dict(zip(forms, norms_of(forms.values()), strict=True))

    def each(self, names: Sequence[str], visit: Visitor, *, linear: bool, last: bool) -> None:
        """Show the form of every parameter that received a gradient to a visitor."""
        for name, form in (self.forms if linear else self.written)(names).items():
            visit(name, form)
