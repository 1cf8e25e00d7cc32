"""One form per parameter, from what was kept of all its uses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..forms import Dense, Form, Gradients, within
from ..run_state import uncast
from .collector import Collector
from .consumers.consumer import Kept, Looped


class KeptForms:
    """Made when they are asked for, and remembered until a pass brings something new."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self.gradients = Gradients()
        self._changes = 0

    def uses(self, names: Iterable[str]) -> dict[str, list[Form]]:
        """Every use's form of those parameters that are not known yet and received a gradient."""
        consumer, known = self._collector.consumer, self.gradients.known
        if isinstance(consumer, Looped):
            return {name: [Dense(consumer.rows[name])] for name in names}
        assert isinstance(consumer, Kept)
        if consumer.changes != self._changes:
            known.clear()
            self._changes = consumer.changes
        missing = {name for name in names if name not in known}
        parts: dict[str, list[Form]] = {}
        for contribution in consumer.contributions if missing else ():
            name = contribution.operand.name  # most are used as they are
            one = None if name is None else [(name, contribution.form)]
            for name, form in one or self._collector.attached(contribution, missing):
                if name in missing:
                    parts.setdefault(name, []).append(form)
        return parts

    def get(self, names: Iterable[str]) -> dict[str, Form]:
        """The forms of those parameters that received a gradient."""
        wanted = list(names)
        return self.gradients.forms(wanted, self.uses(wanted))

    def clear(self) -> None:
        """Forget them."""
        self.gradients.known.clear()

    def weighted_sum(self, c: Tensor, names: Iterable[str], budget: int) -> dict[str, Tensor]:
        """Σ cᵢ gᵢ, for the comparison with autograd's gradient."""
        with torch._C.DisableTorchFunction(), uncast(), within(budget):
            return {name: form.weighted_sum(c) for name, form in self.get(names).items()}
