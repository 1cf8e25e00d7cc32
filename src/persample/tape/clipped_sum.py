"""Clipped sums: coefficients from certified bounds, and the samples that cannot be bounded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..distributed import Reduction
from ..errors import ExtractedNumberWarning, NonFiniteWarning
from ..forms import Stacked
from .clipping import Grouped, Rule, coefficients
from .question import Question
from .source import Forms, Grads


def clipped_sum(
    question: Question,
    max_norm: float,
    rule: Rule,
    names: Sequence[str],
    *,
    warn: bool,
    reduction: Reduction | None = None,
) -> tuple[Grads, bool]:
    """Σᵢ cᵢ gᵢ with ‖cᵢ gᵢ‖ ≤ max_norm; whether some samples were left out (``warn`` says so).

    A ``reduction`` takes each sum to the other processes while the next one is computed.
    """
    question.expect_losses("clipped_sum")
    _warn_of_numbers(question)
    groups = rule.split(names) if isinstance(rule, Grouped) else [tuple(names)]
    within = rule.within if isinstance(rule, Grouped) else rule
    forms, bounds = question.source.bounds(groups, _elements(question, names))
    bad = _left_out(bounds, warn=warn)
    c: dict[str, Tensor] = {}
    for group, sizes in zip(groups, bounds.sqrt(), strict=True):
        share = coefficients(within, sizes, max_norm / len(groups) ** 0.5)
        share = share if bad is None else share.masked_fill(bad, 0)
        c.update(dict.fromkeys(group, share))
    if reduction is None:
        sums = question.source.certain_sums(names, forms, c, bad)
        return question.cast(names, sums, wide=True), bad is not None
    reduction.begin()
    found: Grads = {}
    for some, mine in _in_order(names, forms):
        sums = question.source.certain_sums(some, mine, c, bad)
        for name, value in question.cast(some, sums, wide=True).items():
            reduction.add(name, value)
            found[name] = value
    return found, bad is not None


def _in_order(
    names: Sequence[str], forms: Forms | None
) -> list[tuple[Sequence[str], Forms | None]]:
    """Parameters whose sums are computed at once: many short ones first."""
    if forms is None:
        return [(names, None)]
    joined = {k: list(f.shapes) if isinstance(f, Stacked) else [k] for k, f in forms.items()}
    reached = {name for some in joined.values() for name in some}
    order = sorted(forms, key=lambda key: -len(joined[key]))
    return [
        ([name for name in names if name not in reached], {}),
        *((joined[key], {key: forms[key]}) for key in order),
    ]


def nonfinite(question: Question, names: Sequence[str]) -> Tensor:
    """The samples that contribute nothing to a clipped sum: indices."""
    question.source.ready()
    _, bounds = question.source.bounds([names], _elements(question, names))
    return (~torch.isfinite(bounds[0])).nonzero().flatten()


def _elements(question: Question, names: Sequence[str]) -> int:
    return sum(question.selected[name].numel() for name in names)


def _warn_of_numbers(question: Question) -> None:
    """Warn if a number of several samples may be in the losses: then no bound would hold."""
    taken = question.extracted
    if taken is not None:
        warnings.warn(
            f"a number of several samples was taken out of torch before the losses: {taken.where()}"
            "; if they depend on it, one sample changes the gradients of others, and no bound "
            f"holds; fix: {taken.fix}; tape.explain() lists all",
            ExtractedNumberWarning,
            stacklevel=4,
        )


def _left_out(bounds: Tensor, *, warn: bool) -> Tensor | None:
    """Which samples are not finite; None if all are."""
    finite = torch.isfinite(bounds.sum(0))
    if bool(finite.all()):
        return None
    bad = ~finite
    if warn:
        which = bad.nonzero().flatten().tolist()
        warnings.warn(
            f"samples {which[:8]} have non-finite gradients and contribute zero",
            NonFiniteWarning,
            stacklevel=4,
        )
    return bad
