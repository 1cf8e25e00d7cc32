"""Clipping rules: from norms to coefficients, with a bound that no rule can break."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed import Reduction
from ..errors import ExtractedNumberWarning, NonFiniteWarning, UsageError, warn_caller
from ..forms import Joined
from ..validation import shown
from .question import Forms, Grads, Question

Coefficients = Callable[[Tensor, float], Tensor]


def flat(norms: Tensor, max_norm: float) -> Tensor:
    """min(1, C / ‖gᵢ‖): gradients with a norm above C are scaled down to C."""
    return norms.reciprocal().mul_(max_norm).clamp_(max=1.0)


def automatic(norms: Tensor, max_norm: float) -> Tensor:
    """C / (‖gᵢ‖ + 0.01): every gradient is scaled to about the same norm."""
    return max_norm / (norms + 0.01)


@dataclass(frozen=True)
class Grouped:
    """Clip groups of parameters on their own, each to C/√(number of groups)."""

    groups: tuple[tuple[str, ...], ...] | None = None
    within: Coefficients = flat

    def split(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """The groups; without any, every parameter is one."""
        if self.groups is None:
            return [(name,) for name in names]
        listed = [name for group in self.groups for name in group]
        if sorted(listed) != sorted(names):
            odd = set(names) ^ set(listed) or {k for k in listed if listed.count(k) > 1}
            raise UsageError(
                f"the groups must name every recorded parameter once: {sorted(odd)[:4]}",
                fix="groups are lists of names from tape.names",
            )
        return list(self.groups)


def per_layer() -> Grouped:
    """Clip every parameter on its own, to C/√(number of parameters)."""
    return Grouped()


def per_group(groups: Iterable[Iterable[str]], *, within: Coefficients = flat) -> Grouped:
    """Clip the given groups of parameters, each to C/√(number of groups).

    >>> import torch, persample
    >>> model = torch.nn.Linear(3, 2)
    >>> with persample.record(model) as tape:
    ...     tape.backward(model(torch.randn(4, 3)).square().sum(1))
    >>> found = tape.clipped_sum(1.0, rule=persample.per_group([["weight"], ["bias"]]))

    Args:
        groups: Lists of names that together name every recorded parameter once.
        within: The rule inside a group: :func:`flat`, :func:`automatic`, or your own.
    """
    found = [groups] if isinstance(groups, str) or not isinstance(groups, Iterable) else [*groups]
    if any(isinstance(group, str) or not isinstance(group, Iterable) for group in found):
        raise UsageError(
            f"groups are lists of names, got {shown(groups)}",
            fix="per_group([['0.weight', '0.bias'], ['2.weight']])",
        )
    return Grouped(tuple(tuple(group) for group in found), within)


Rule = Coefficients | Grouped | Callable[[Tensor], Tensor]


def coefficients(rule: Rule, bounds: Tensor, max_norm: float, bad: Tensor | None) -> Tensor:
    """The rule's coefficients for certified norms above zero, never more than C / norm.

    ``bad`` samples get zero: they are not finite.
    """
    numbers = torch.finfo(bounds.dtype)
    safe = bounds if bad is None else bounds.masked_fill(bad, 1.0)
    most = numbers.max**0.5 / 4  # times a number whose square is finite: so is the product
    if rule is flat:  # this one and the next keep to C / norm
        return _without(bad, rule(safe, max_norm), numbers)
    if rule is automatic:
        return _without(bad, rule(safe, max_norm).clamp_(max=most), numbers)
    given = _call_rule(rule, safe.clone(), max_norm)  # the rule may write to its norms
    if (
        not isinstance(given, Tensor)
        or given.shape != bounds.shape
        or given.is_complex()
        or given.layout is not torch.strided
    ):
        raise UsageError(
            f"a clipping rule must return {tuple(bounds.shape)} real coefficients, got "
            f"{shown(given)}",
            fix="rule(norms, max_norm) -> tensor of the same shape",
        )
    if given.device != bounds.device:
        raise UsageError(
            f"a clipping rule returned coefficients on {given.device}, not on {bounds.device}",
            fix="compute them from the norms that the rule is given, on their device",
        )
    if not bool(torch.isfinite(given).all()) or bool((given < 0).any()):
        raise UsageError(
            "a clipping rule returned a negative or non-finite coefficient",
            fix="return numbers between 0 and max_norm / norms; zero leaves a sample out",
        )
    limited = torch.minimum(given.detach().to(bounds.dtype), max_norm / safe).clamp_(max=most)
    return _without(bad, limited, numbers)


def _without(bad: Tensor | None, given: Tensor, numbers: torch.finfo) -> Tensor:
    """Coefficients without bad samples, and without those that are too small for their dtype.

    They are rounded by more than a bound allows.
    """
    normal = torch.threshold_(given, numbers.tiny, 0.0)
    return normal if bad is None else normal.masked_fill_(bad, 0.0)


def _call_rule(rule: Any, norms: Tensor, max_norm: float) -> object:
    """Call a rule of (norms, max_norm) or of norms alone."""
    if rule is per_layer or rule is per_group or not callable(rule):
        raise UsageError(
            f"a clipping rule is a function of norms, got {shown(rule)}",
            fix="rule=persample.flat, persample.per_layer(), persample.per_group([...])",
        )
    try:
        signature = inspect.signature(rule)
    except ValueError:  # built in, without a signature
        return rule(norms, max_norm)
    for given in ((norms, max_norm), (norms,)):
        try:
            signature.bind(*given)
        except TypeError:
            continue
        return rule(*given)
    raise UsageError(
        f"a clipping rule takes norms, or norms and max_norm; {shown(rule)} takes {signature}",
        fix="rule=lambda norms, max_norm: (max_norm / norms).clamp(max=1)",
    )


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
    forms, bounds = question.bounds(groups, _elements(question, names))
    bad = _left_out(bounds, warn=warn)
    c: dict[str, Tensor] = {}
    for group, sizes in zip(groups, bounds.sqrt().unbind(), strict=True):
        share = coefficients(within, sizes, max_norm / len(groups) ** 0.5, bad)
        c.update(dict.fromkeys(group, share))
    if reduction is None:
        sums = question.certain_sums(names, forms, c, bad)
        return question.cast(names, sums, wide=True), bad is not None
    reduction.begin()
    found: Grads = {}
    for some, mine in _in_order(names, forms):
        sums = question.certain_sums(some, mine, c, bad)
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
    joined = {k: f.names if isinstance(f, Joined) else [k] for k, f in forms.items()}
    reached = {name for some in joined.values() for name in some}
    order = sorted(forms, key=lambda key: -len(joined[key]))
    return [
        ([name for name in names if name not in reached], {}),
        *((joined[key], {key: forms[key]}) for key in order),
    ]


def nonfinite(question: Question, names: Sequence[str]) -> Tensor:
    """The samples that contribute nothing to a clipped sum: indices."""
    question.ready()
    _, bounds = question.bounds([names], _elements(question, names))
    return (~torch.isfinite(bounds[0])).nonzero().flatten()


def _elements(question: Question, names: Sequence[str]) -> int:
    selected = question.selected
    return max(1, sum([selected[name].numel() for name in names]))


def _warn_of_numbers(question: Question) -> None:
    """Warn if a number of several samples may be in the losses: then no bound would hold."""
    taken = question.extracted
    if taken is not None:
        warn_caller(
            f"a number of several samples was taken out of torch before the losses: {taken.where()}"
            "; if they depend on it, one sample changes the gradients of others, and no bound "
            f"holds; fix: {taken.fix}; tape.explain() lists all",
            ExtractedNumberWarning,
        )


def _left_out(bounds: Tensor, *, warn: bool) -> Tensor | None:
    """Which samples are not finite; None if all are."""
    if math.isfinite(bounds.sum()):
        return None
    bad = ~torch.isfinite(bounds.sum(0))
    if not bool(bad.any()):
        return None
    if warn:
        which = bad.nonzero().flatten().tolist()
        warn_caller(
            f"samples {which[:8]} have non-finite gradients and contribute zero",
            NonFiniteWarning,
        )
    return bad
