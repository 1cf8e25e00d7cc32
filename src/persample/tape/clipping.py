"""Clipping rules: from norms to coefficients, with a bound that no rule can break."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..validation import shown

Coefficients = Callable[[Tensor, float], Tensor]


def flat(norms: Tensor, max_norm: float) -> Tensor:
    """min(1, C / ‖gᵢ‖): gradients with a norm above C are scaled down to C."""
    return (max_norm / norms).clamp(max=1.0)


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


def coefficients(rule: Rule, bounds: Tensor, max_norm: float) -> Tensor:
    """The rule's coefficients for certified norms, never more than C / norm; zero if not finite."""
    finite, numbers = torch.isfinite(bounds), torch.finfo(bounds.dtype)
    safe = torch.where(finite, bounds, 1.0).clamp_(min=numbers.tiny)
    most = numbers.max**0.5 / 4  # times a number whose square is finite: so is the product
    if rule is flat or rule is automatic:  # these keep to C / norm
        return _normal(rule(safe, max_norm).clamp_(max=most), numbers).mul_(finite)
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
    return torch.where(finite, _normal(limited, numbers), 0.0)


def _normal(given: Tensor, numbers: torch.finfo) -> Tensor:
    """Coefficients too small for their dtype are rounded by more than a bound allows: none."""
    return torch.threshold_(given, numbers.tiny, 0.0)


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
