"""Clipped sums: coefficients from certified bounds, and the samples that cannot be bounded."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..distributed import Reduction
from ..errors import ExtractedNumberWarning, NonFiniteWarning
from ..forms import Stacked, sums
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
    source = question.source
    with source.clipping_forms(names, separate=len(groups) > 1) as forms:
        bounds = source.sq_bounds(names, forms)
        whole = _certain(question, bounds, names)
        bad = _left_out(whole, warn=warn)
        c: dict[str, Tensor] = {}
        for group in groups:
            sizes = whole
            if len(groups) > 1:
                mine = {name: bounds[name] for name in group if name in bounds}
                sizes = _certain(question, mine, group)
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
        whole = _certain(question, source.sq_bounds(names, forms), names)
    return (~torch.isfinite(whole)).nonzero().flatten()


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


def _certain(question: Question, bounds: Grads, names: Iterable[str]) -> Tensor:
    """Bounds of ‖gᵢ‖² over some parameters."""
    elements = sum(question.selected[name].numel() for name in names)
    return sums.bound_over_parameters(bounds, elements, question.n, question.device)


def _left_out(sq_norms: Tensor, *, warn: bool) -> Tensor | None:
    """Which samples are not finite; None if all are."""
    finite = torch.isfinite(sq_norms)
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
