"""``record(model, grad=True)``: the ``.grad`` that the same program leaves without persample."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import UsageError
from ..forms import Form, within
from ..run_state import uncast
from ..uses.context import Context
from .collector import Collector
from .consumers.consumer import Kept
from .consumers.lean import Lean
from .contribution import Contribution


class OrdinaryGradients:
    """Adds what each backward pass brought, summed over samples, to ``.grad``."""

    def __init__(self, context: Context, collector: Collector) -> None:
        self._context, self._collector = context, collector

    def add(self) -> None:
        """A pass succeeded: its sums stay scaled as its losses were."""
        consumer = self._collector.consumer
        sums: Mapping[str, Tensor] = {}
        with torch._C.DisableTorchFunction(), torch.no_grad(), uncast():
            if isinstance(consumer, Kept):
                sums = self._summed(consumer.latest())
            elif isinstance(consumer, Lean):
                sums = consumer.totals
        factor = self._context.backward.factor
        self.write(sums if factor == 1.0 else {k: g / factor for k, g in sums.items()})

    def write(self, sums: Mapping[str, Tensor]) -> None:
        """Add sums to ``.grad``; where the model is spread over processes, as it does itself."""
        selected, processes = self._context.parameters.selected, self._context.processes
        with torch._C.DisableTorchFunction(), torch.no_grad():
            typed = {k: g.detach().to(selected[k].dtype) for k, g in sums.items()}
            if processes is not None:
                processes.add_mean(typed, selected)
                return
            for name, value in typed.items():
                parameter = selected[name]
                parameter.grad = value if parameter.grad is None else parameter.grad + value

    def _summed(self, contributions: list[Contribution]) -> dict[str, Tensor]:
        """Σᵢ gᵢ of one pass."""
        selected = self._context.parameters.selected
        for contribution in contributions:
            _expect_dense(contribution)
        with within(self._context.options.budget):
            totals = self._collector.totals(contributions, selected)
            return {name: ones_sum(form) for name, form in totals.items()}


def ones_sum(form: Form) -> Tensor:
    """Σᵢ gᵢ."""
    return form.weighted_sum(torch.ones(form.n, dtype=torch.float64, device=form.device))


def _expect_dense(contribution: Contribution) -> None:
    """Refuse tables whose ordinary gradient would be sparse."""
    use = contribution.use
    if use.operator == "embedding" and len(use.leaves) > 4 and use.leaves[4] is True:
        raise UsageError(
            "record(..., grad=True) of an embedding with sparse=True",
            why="its ordinary gradient is a sparse tensor, and persample's sums are dense",
            fix="sparse=False; or record without grad=True and set_grad(tape.weighted_sum(...))",
        )
