"""Every parameter's form, made on demand, and whether it may be trusted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..backward.collector import Collector
from ..backward.consumers.kept import Kept, Looped
from ..backward.contribution import Contribution
from ..backward.kept_forms import KeptForms
from ..errors import UsageError
from ..forms import (
    Form,
    Outer,
    Unsure,
    bound_norms,
    doubts,
    kept_rows,
    pull_back_together,
    recompute_doubtful,
    scratch,
    share_products,
    stack_forms,
    within,
)
from ..guards.guards import Guards
from ..uses.context import Context
from .source import Forms, Grads, Visitor


def expect_backward(context: Context) -> None:
    """Refuse a question that nothing was back-propagated for."""
    if not context.backward.count:
        raise UsageError(
            "no backward pass was recorded",
            fix="call tape.backward(losses) with one loss per sample",
        )


class ParameterForms:
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
        rows = kept_rows(forms)
        used = sum(form.nbytes() for form in rows.values())
        forms |= rows
        with within(scratch() - used):
            yield forms if separate else stack_forms(forms)

    def sq_norms(self, names: Iterable[str], *, separate: bool) -> Grads:
        """‖gᵢ‖², to be added up; ``separate``: of every parameter that received a gradient."""
        forms: Forms = self.written(names)
        forms = forms if separate else stack_forms(forms)
        with _sharing(forms):
            found = {name: form.estimated() for name, form in forms.items()}
        unsure = [name for name, (norms, scale) in found.items() if scale is not norms]
        if unsure:
            for name, doubt in zip(unsure, doubts([found[n] for n in unsure]), strict=True):
                if doubt:
                    recompute_doubtful(*found[name], forms[name].exactly)
        return {name: norms for name, (norms, _) in found.items()}

    def sq_bounds(self, names: Iterable[str], forms: Forms | None) -> Grads:
        """Certified bounds of ‖gᵢ‖² for :meth:`clipping_forms` forms."""
        assert forms is not None
        with _sharing(forms):
            return _bounds(forms)

    def each(self, names: Sequence[str], visit: Visitor, *, linear: bool, last: bool) -> None:
        """Show the form of every parameter that received a gradient to a visitor."""
        for name, form in (self.forms if linear else self.written)(names).items():
            visit(name, form)

    def found_grads(self, names: Sequence[str]) -> Grads | None:
        """Nothing was computed in advance."""
        return None

    def found_dots(self, direction: Mapping[str, Tensor], names: Sequence[str]) -> Grads | None:
        """Nothing was computed in advance."""
        return None

    def found_projections(self, wanted: tuple[int, int]) -> list[Tensor] | None:
        """Nothing was computed in advance."""
        return None

    def found_moments(self) -> tuple[Grads, Grads, Grads] | None:
        """Nothing was computed in advance."""
        return None


def _bounds(forms: Forms) -> Grads:
    """Every form's bounds; products of positions of all parameters are looked at together."""
    found: Grads = {}
    unsure: dict[tuple[torch.dtype, torch.device], dict[str, Unsure]] = {}
    for name, form in forms.items():
        norms = form.unsure()
        if norms is None:
            found[name] = form.measured()[1]
        else:
            alike = (norms.found.dtype, norms.found.device)
            unsure.setdefault(alike, {})[name] = norms
    for group in unsure.values():
        for name, (bounds, _) in zip(group, bound_norms(list(group.values())), strict=True):
            found[name] = bounds
    return found


def _sharing(forms: Forms) -> contextlib.AbstractContextManager[None]:
    """Keep products of positions that several parameters have in common."""
    outer = [f for f in forms.values() if isinstance(f, Outer) and f.t > 1]
    return share_products(factor for form in outer for factor in form.given)
