"""Rules that users registered, applied inside a recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError, describe, here
from ..layouts import Operator, collect
from ..layouts.layout import Layout, closed
from ..recording.recorder import Recording
from ..uses.context import Context
from .expanded_weights_impl import ExpandedWeight
from .sample_batch import Batch

BUILT_IN: set[Any] = set()


def use_own_rules(recording: Recording, batch: Batch) -> None:
    """Let the recording apply rules that are not ours, if there are any."""
    own = {
        function: rule
        for function, rule in ExpandedWeight.handled_functions.items()
        if rule not in BUILT_IN
    }
    if own:
        recording.intercept(OwnRules(recording.context, batch, own))


class OwnRules:
    """Expand the parameters among the arguments, apply the rule, say where the samples are."""

    def __init__(self, context: Context, batch: Batch, own: dict[Any, Any]) -> None:
        self._context, self.batch, self.own = context, batch, own

    def __call__(
        self, operator: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The rule's result, if a parameter is among the arguments; else NotImplemented."""
        values = [*args, *kwargs.values()]
        slots = self._context.parameters.slots
        if (
            func not in self.own
            or not torch.is_grad_enabled()
            or not any(id(v) in slots for v in values)
        ):
            return NotImplemented
        self._expect_samples(operator, values)
        expanded = [self._expanded(v) if id(v) in slots else v for v in values]
        out = self.own[func].apply(tuple(kwargs), func, *expanded)
        for tensor in collect(out):
            if tensor.requires_grad:
                self._context.user_code.vouched.append(tensor.grad_fn)
                self._context.states.put(tensor, closed(self.batch.dim))
        return out

    def _expanded(self, parameter: Tensor) -> ExpandedWeight:
        made = ExpandedWeight(parameter, self.batch.rows, self.batch.loss_reduction)
        made.set_batch_first(self.batch.dim == 0)
        made.set_allow_smaller_batches(self.batch.size < self.batch.rows)
        return made

    def _expect_samples(self, operator: Operator, values: list[Any]) -> None:
        data = next((v for v in values if isinstance(v, Tensor)), None)
        state = None if data is None else self._context.look(data)
        if self.batch.size == 1 or state is closed(self.batch.dim):
            return
        kind = f"{state}" if isinstance(state, Layout) else "no samples"
        raise UsageError(
            "Expected ExpandedWeights to have batch size matching input: a rule of your own for "
            f"{operator.name} was given an input with {kind}",
            where=describe(here()),
            why=f"rules for Expanded Weights need one sample per index of axis {self.batch.dim}",
            fix="bring the samples there, or remove the rule: persample follows every operator",
        )
