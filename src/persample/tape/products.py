"""Products of gradients: between samples, with a direction, of random projections; moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import UsageError
from ..forms import Dense, Form, Scaled, real, wide
from ..forms.sums import (
    NoiseScale,
    Sum,
    project_parameter,
    variance_from_moments,
)
from .question import Grads, Question


def gram(question: Question, names: Sequence[str]) -> Tensor:
    """⟨gᵢ, gⱼ⟩: (n, n)."""
    total = Sum(question.n, question.n, device=question.device)
    question.each(names, lambda _, form: total.add(form.dots(form)))
    return total.value


def cosine(products: Tensor) -> Tensor:
    """⟨gᵢ, gⱼ⟩ / ‖gᵢ‖‖gⱼ‖ from the products; zero where a gradient is zero."""
    sizes = products.diagonal().clamp(min=0).sqrt()
    scale = torch.where(sizes > 0, 1 / sizes, torch.zeros_like(sizes))
    return products * scale.unsqueeze(0) * scale.unsqueeze(1)


def cross(mine: Question, other: Question, names: Sequence[str]) -> Tensor:
    """⟨gᵢ, hⱼ⟩ over parameters that both tapes recorded: (n, m). One must have kept its forms."""
    common = [name for name in names if name in other.selected]
    if not common:
        raise UsageError(
            "the two tapes have no parameter in common",
            why=f"this one was queried for {list(names)[:3]}, the other recorded "
            f"{list(other.selected)[:3]}",
            fix="record the same parameters of the same model in both",
        )
    for name in common:
        one, two = mine.selected[name], other.selected[name]
        if (one.shape, one.dtype, one.device) != (two.shape, two.dtype, two.device):
            raise UsageError(
                f"the other tape's {name!r} has another shape, dtype or device",
                why="the tapes are of different models",
                fix="record both on the same model, or select params= that fit",
            )
    if not other.keeps and mine.keeps:
        return cross(other, mine, common).T
    others = other.forms(common)
    total = Sum(mine.n, other.n, device=mine.device)

    def visit(name: str, form: Form) -> None:
        if name in others:
            total.add(form.dots(others[name]))

    mine.each(common, visit)
    return total.value


def dots(question: Question, direction: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """⟨gᵢ, V⟩: (n,), or (n, m) for m directions."""
    several = any(direction[name].dim() > question.selected[name].dim() for name in names)
    found = None if several else question.found_dots(direction, names)
    count = [direction[names[0]].shape[0]] if several else []
    total = Sum(question.n, *count, device=question.device)
    if found is not None:
        total.add(*found.values())
        return total.value

    def visit(name: str, form: Form) -> None:
        along = direction[name].detach()
        total.add(form.dots(Dense(along.to(form.dtype))) if several else form.dot(along))

    question.each(names, visit, linear=True)
    return total.value


def project(
    question: Question, wanted: tuple[int, int], names: Sequence[str],
    scale: Mapping[str, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Random projections (dim, seed) of gᵢ, or of scale ∘ gᵢ: (n, dim)."""
    total = Sum(question.n, wanted[0], device=question.device)
    found = None
    if scale is None and len(names) == len(question.selected):
        found = question.found_projections(wanted)
    if found is not None:
        total.add(*found)
        return total.value

    def visit(name: str, form: Form) -> None:
        if scale is not None:
            factor = scale[name].detach().to(real(wide(form.dtype)), copy=True)
            form = Scaled(form, factor, (id(scale), name), form.dtype)
        total.add(project_parameter(name, form, *wanted))

    question.each(names, visit, linear=True)
    return total.value


def second_moment(question: Question, names: Sequence[str]) -> Grads:
    """meanᵢ gᵢ², element by element."""
    found, n = question.found_moments(), max(question.n, 1)
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
    n, found = max(question.n, 1), question.found_moments()
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
    found = question.found_moments()
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
    mean_square = float(question.sq_norms([names])[0].double().mean())
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
