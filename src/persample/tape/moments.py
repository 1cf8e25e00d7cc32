"""Queries about the variance of gradients over samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import UsageError
from ..forms import Form, real, wide
from ..forms.sums import NoiseScale, variance_from_moments
from .question import Grads, Question


def second_moment(question: Question, names: Sequence[str]) -> Grads:
    """meanᵢ gᵢ², element by element."""
    found, n = question.source.found_moments(), max(question.n, 1)
    squares = found and found[1]
    each = _of_each(question, names, squares, lambda form: form.moments(wide(form.dtype))[1])
    return {name: value / n for name, value in each.items()}


def _of_each(
    question: Question, names: Sequence[str], known: Grads | None, compute: Callable[[Form], Tensor]
) -> Grads:
    """A tensor for each parameter: what is known, or what its form gives; zeros without a form."""
    found: Grads = dict(known or {})
    if known is None:
        question.each(names, lambda name, form: found.update({name: compute(form)}))
    return {name: found[name] if name in found else _zeros(question, name) for name in names}


def _mean(question: Question, names: Sequence[str]) -> Grads:
    n, found = max(question.n, 1), question.source.found_moments()
    if found is not None:
        means = {name: total / n for name, total in found[0].items()}
        return question.cast(names, means, wide=True)
    ones = torch.ones(question.n, dtype=torch.float64, device=question.device)
    return question.weighted_sum(names, ones / n, wide=True)


def variance(question: Question, names: Sequence[str]) -> Grads:
    """The unbiased variance over samples, element by element."""
    n = question.n
    if n < 2:
        raise UsageError("a variance needs at least two samples", fix="record a larger batch")
    found = question.source.found_moments()
    variances = found and {name: value.clone() for name, value in found[2].items()}
    return _of_each(
        question,
        names,
        variances,
        lambda form: variance_from_moments(form.moments(), n).to(real(form.dtype)),
    )


def noise_scale(question: Question, names: Sequence[str]) -> NoiseScale:
    """The simple gradient noise scale tr Σ / |G|², with its parts."""
    question.expect_losses("noise_scale")
    n = question.n
    if n < 2:
        raise UsageError("the noise scale needs at least two samples", fix="record a larger batch")
    mean_square = float(question.sq_norms(names).double().mean())
    means = _mean(question, names).values()
    square_mean = sum(float(g.abs().double().square().sum()) for g in means)
    trace = n * (mean_square - square_mean) / (n - 1)
    if trace < 1e-3 * mean_square:  # almost all cancels between the two
        found = variance(question, names).values()
        trace = sum(float(v.sum(dtype=torch.float64)) for v in found)
    gradient = square_mean - trace / n
    return NoiseScale(trace / gradient if gradient else float("inf"), trace, gradient, n)


def _zeros(question: Question, name: str) -> Tensor:
    parameter = question.selected[name]
    return torch.zeros_like(parameter, dtype=real(parameter.dtype), requires_grad=False)
