"""Clipped sums: coefficients from certified bounds, and the samples that cannot be bounded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..distributed import Reduction
from ..errors import ExtractedNumberWarning, NonFiniteWarning
from ..forms import Stacked, bound_norms
from .clipping import Grouped, Rule, coefficients
from .question import Question
from .source import Forms, Grads, Lengths


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
    source = question.source
    with source.clipping_forms(names, separate=len(groups) > 1) as forms:
        bounds = _bounds(question, source.clipping_norms(names, forms), groups)
        bad = _left_out(bounds, warn=warn)
        c: dict[str, Tensor] = {}
        for group, sizes in zip(groups, bounds, strict=True):
            share = coefficients(within, sizes.sqrt(), max_norm / len(groups) ** 0.5)
            share = share if bad is None else share.masked_fill(bad, 0)
            c.update(dict.fromkeys(group, share))
        if reduction is not None:
            reduction.begin()
            found = _send_sums(question, names, c, bad, forms, reduction)
        else:
            found = question.weighted_sum(
                names, c, bad=bad, clipping_forms=forms, certain=True, wide=True, last=True
            )
    return found, bad is not None


def _send_sums(
    question: Question,
    names: Sequence[str],
    c: Grads,
    bad: Tensor | None,
    forms: Forms | None,
    reduction: Reduction,
) -> Grads:
    """The sums, each sent when it is computed: many short ones first, they are computed at once."""
    if forms is None:
        found = question.weighted_sum(names, c, bad=bad, certain=True, wide=True, last=True)
        for name in names:
            reduction.add(name, found[name])
        return found
    joined = {k: list(f.shapes) if isinstance(f, Stacked) else [k] for k, f in forms.items()}
    reached = {name for some in joined.values() for name in some}
    found = question.weighted_sum(
        [n for n in names if n not in reached], c, clipping_forms={}, wide=True
    )
    for name, value in found.items():
        reduction.add(name, value)
    for key in sorted(forms, key=lambda key: -len(joined[key])):
        part = {key: forms[key]}
        some = question.weighted_sum(
            joined[key], c, bad=bad, clipping_forms=part, certain=True, wide=True
        )
        for name, value in some.items():
            reduction.add(name, value)
        found |= some
    return found


def nonfinite(question: Question, names: Sequence[str]) -> Tensor:
    """The samples that contribute nothing to a clipped sum: indices."""
    source = question.source
    source.ready()
    with source.clipping_forms(names, separate=False) as forms:
        whole = _bounds(question, source.clipping_norms(names, forms), [names])
    return (~torch.isfinite(whole[0])).nonzero().flatten()


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


def _bounds(question: Question, norms: Lengths, groups: Sequence[Sequence[str]]) -> Tensor:
    """Bounds of ‖gᵢ‖² over groups of parameters: (groups, n)."""
    elements = sum(question.selected[name].numel() for group in groups for name in group)
    listed = [[each for name in group for each in norms.get(name, ())] for group in groups]
    return bound_norms(listed, question.n, question.device, elements)


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
