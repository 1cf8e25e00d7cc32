"""One form per parameter, from what was kept of all its uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..forms import Dense, Form, within
from ..run_state import uncast
from .collector import Collector
from .consumers.kept import Kept, Looped


class KeptForms:
    """Made when they are asked for, and remembered until a pass brings something new."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._cache: dict[str, Form] = {}
        self._changes = 0

    def get(self, names: Iterable[str]) -> dict[str, Form]:
        """The forms of those parameters that received a gradient."""
        consumer, wanted = self._collector.consumer, list(names)
        if isinstance(consumer, Looped):
            return {name: Dense(consumer.rows[name]) for name in wanted}
        assert isinstance(consumer, Kept)
        if consumer.changes != self._changes:
            self._cache.clear()
            self._changes = consumer.changes
        missing = {name for name in wanted if name not in self._cache}
        if missing:
            self._cache |= self._collector.totals(consumer.contributions, missing)
        return {name: self._cache[name] for name in wanted if name in self._cache}

    def replace(self, forms: Mapping[str, Form]) -> None:
        """Other forms of the same gradients, which later questions shall use."""
        self._cache.update(forms)

    def clear(self) -> None:
        """Forget them."""
        self._cache.clear()

    def weighted_sum(self, c: Tensor, names: Iterable[str], budget: int) -> dict[str, Tensor]:
        """Σ cᵢ gᵢ, for the comparison with autograd's gradient."""
        with torch._C.DisableTorchFunction(), uncast(), within(budget):
            return {name: form.weighted_sum(c) for name, form in self.get(names).items()}
