"""Clipped sums: coefficients from certified bounds, and the samples that cannot be bounded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..distributed import Reduction
from ..errors import ExtractedNumberWarning, NonFiniteWarning
from ..forms import Stacked, certain_sums
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
    if reduction is not None:
        reduction.begin()
    if forms is None:
        found = question.weighted_sum(names, c, bad=bad, certain=True, wide=True, last=True)
        if reduction is not None:
            _send(found, reduction)
    elif reduction is None:
        found = question.cast(names, certain_sums(forms, c, bad), wide=True)
    else:
        found = _send_sums(question, names, c, bad, forms, reduction)
    return found, bad is not None


def _send(sums: Grads, reduction: Reduction) -> None:
    for name, value in sums.items():
        reduction.add(name, value)


def _send_sums(
    question: Question,
    names: Sequence[str],
    c: Grads,
    bad: Tensor | None,
    forms: Forms,
    reduction: Reduction,
) -> Grads:
    """The sums, each sent when it is computed: many short ones first, they are computed at once."""
    joined = {k: list(f.shapes) if isinstance(f, Stacked) else [k] for k, f in forms.items()}
    reached = {name for some in joined.values() for name in some}
    found: Grads = {}
    for some in ([n for n in names if n not in reached], *sorted(joined.values(), key=len)[::-1]):
        mine = {key: forms[key] for key in some[:1] if key in forms}
        sums = question.cast(some, certain_sums(mine, c, bad), wide=True)
        _send(sums, reduction)
        found |= sums
    return found


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
