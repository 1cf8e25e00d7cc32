"""What was kept of all uses: one form per parameter, and what a pass adds to ``.grad``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..errors import UsageError
from ..forms import Dense, Form, Gradients, total, within
from ..run_state import uncast
from ..uses import Context
from .collector import Collector
from .consumers.consumer import Kept, Looped, expanded
from .consumers.lean import Lean
from .contribution import Contribution
from .waiting import join_waiting


class KeptForms:
    """Made when they are asked for, and remembered until a pass brings something new."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self.gradients = Gradients()
        self._changes = 0

    def uses(self, names: Iterable[str]) -> dict[str, list[Form]]:
        """Every use's form of those parameters that are not known yet and received a gradient."""
        consumer = self._collector.consumer
        if isinstance(consumer, Looped):
            return {name: [Dense(consumer.rows[name])] for name in names}
        missing = self._missing(names)
        assert isinstance(consumer, Kept)
        return self._parts(consumer.contributions, missing) if missing else {}

    def joined(self, names: Iterable[str]) -> tuple[dict[str, list[Form]], dict[str, Form]]:
        """The same for one query about all of them; and small layers that are asked together."""
        consumer = self._collector.consumer
        if not isinstance(consumer, Kept):
            return self.uses(names), {}
        missing = self._missing(names)
        others = [entry for entry in consumer.entries if isinstance(entry, Contribution)]
        parts = self._parts(others, missing)
        waiting = consumer.waiting()
        return parts, join_waiting(waiting, missing, parts) if waiting else {}

    def _missing(self, names: Iterable[str]) -> set[str]:
        consumer, known = self._collector.consumer, self.gradients.known
        assert isinstance(consumer, Kept)
        if consumer.changes != self._changes:
            known.clear()
            self._changes = consumer.changes
        return {name for name in names if name not in known}

    def _parts(
        self, contributions: Iterable[Contribution], missing: set[str]
    ) -> dict[str, list[Form]]:
        parts: dict[str, list[Form]] = {}
        for contribution in contributions:
            own = contribution.operand.name
            if own is None:
                for name, form in self._collector.attached(contribution, missing):
                    parts.setdefault(name, []).append(form)
            elif own in missing:  # most are used as they are
                parts.setdefault(own, []).append(contribution.form)
        return parts

    def get(self, names: Iterable[str]) -> dict[str, Form]:
        """The forms of those parameters that received a gradient."""
        wanted = list(names)
        return self.gradients.forms(wanted, self.uses(wanted))

    def weighted_sum(self, c: Tensor, names: Iterable[str], budget: int) -> dict[str, Tensor]:
        """Σ cᵢ gᵢ, for the comparison with autograd's gradient."""
        with torch._C.DisableTorchFunction(), uncast(), within(budget):
            return {name: form.weighted_sum(c) for name, form in self.get(names).items()}


def add_to_grad(context: Context, collector: Collector) -> None:
    """A pass succeeded: add what it brought, summed over samples, to ``.grad``.

    Sums stay scaled as the losses were.
    """
    consumer, factor = collector.consumer, context.backward.factor
    sums: Mapping[str, Tensor] = {}
    with torch._C.DisableTorchFunction(), torch.no_grad(), uncast():
        if isinstance(consumer, Kept):
            sums = _summed(context, collector, expanded(consumer.latest()))
        elif isinstance(consumer, Lean):
            sums = consumer.totals
    write_grad(context, sums if factor == 1.0 else {k: g / factor for k, g in sums.items()})


def write_grad(context: Context, sums: Mapping[str, Tensor]) -> None:
    """Add sums to ``.grad``; where the model is spread over processes, as it does itself."""
    selected, processes = context.parameters.selected, context.processes
    context.backward.written.update(sums)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        typed = {k: g.detach().to(selected[k].dtype) for k, g in sums.items()}
        if processes is not None:
            processes.add_mean(typed, selected)
            return
        for name, value in typed.items():
            parameter = selected[name]
            parameter.grad = value if parameter.grad is None else parameter.grad + value


def _summed(
    context: Context, collector: Collector, contributions: list[Contribution]
) -> dict[str, Tensor]:
    """Σᵢ gᵢ of one pass."""
    parts: dict[str, list[Form]] = {}
    with within(context.options.budget):
        for contribution in contributions:
            _expect_dense(contribution)
            for name, form in collector.attached(contribution):
                parts.setdefault(name, []).append(form)
        return {name: total(forms).sum_of_samples() for name, forms in parts.items()}


def _expect_dense(contribution: Contribution) -> None:
    """Refuse tables whose ordinary gradient would be sparse."""
    use = contribution.use
    if use.operator == "embedding" and len(use.leaves) > 4 and use.leaves[4] is True:
        raise UsageError(
            "record(..., grad=True) of an embedding with sparse=True",
            why="its ordinary gradient is a sparse tensor, and persample's sums are dense",
            fix="sparse=False; or record without grad=True and set_grad(tape.weighted_sum(...))",
        )
