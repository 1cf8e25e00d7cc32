"""Clipped sums: coefficients from certified bounds, and the samples that cannot be bounded."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import NonFiniteWarning
from ..forms import sums
from .clipping import Grouped, Rule, coefficients
from .question import Question
from .source import Grads


def clipped_sum(
    question: Question, max_norm: float, rule: Rule, names: Sequence[str], *, warn: bool
) -> tuple[Grads, bool]:
    """Σᵢ cᵢ gᵢ with ‖cᵢ gᵢ‖ ≤ max_norm; whether some samples were left out (``warn`` says so)."""
    question.expect_losses("clipped_sum")
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
        found = question.weighted_sum(
            names, c, bad=bad, clipping_forms=forms, certain=True, wide=True, last=True
        )
    return found, bad is not None


def nonfinite(question: Question, names: Sequence[str]) -> Tensor:
    """The samples that contribute nothing to a clipped sum: indices."""
    source = question.source
    source.ready()
    with source.clipping_forms(names, separate=False) as forms:
        whole = _certain(question, source.sq_bounds(names, forms), names)
    return (~torch.isfinite(whole)).nonzero().flatten()


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
