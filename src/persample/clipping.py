"""Clipping rules: from norms to coefficients, with a bound that no rule can break."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import UsageError

Coefficients = Callable[[Tensor, float], Tensor]


def flat(norms: Tensor, max_norm: float) -> Tensor:
    """min(1, C / ‖gᵢ‖): gradients longer than C are scaled down to it."""
    return (max_norm / norms).clamp(max=1.0)


def automatic(norms: Tensor, max_norm: float) -> Tensor:
    """C / (‖gᵢ‖ + 0.01): every gradient is scaled to about the same length."""
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
            missing = set(names) ^ set(listed)
            raise UsageError(
                f"the groups must name every recorded parameter once: {sorted(missing)[:4]}",
                fix="groups are lists of names from tape.names",
            )
        return list(self.groups)


def per_layer() -> Grouped:
    """Clip every parameter on its own, to C/√(number of parameters)."""
    return Grouped()


def per_group(groups: Iterable[Iterable[str]], *, within: Coefficients = flat) -> Grouped:
    """Clip the given groups of parameters, each to C/√(number of groups)."""
    return Grouped(tuple(tuple(group) for group in groups), within)


Rule = Coefficients | Grouped | Callable[[Tensor], Tensor]


def coefficients(rule: Rule, bounds: Tensor, max_norm: float) -> Tensor:
    """The rule's coefficients for certified norms, never more than C / norm; zero if not finite."""
    finite = torch.isfinite(bounds)
    safe = torch.where(finite, bounds, 1.0).clamp_(min=torch.finfo(bounds.dtype).tiny)
    if rule is flat or rule is automatic:  # these keep to C / norm
        return rule(safe, max_norm).mul_(finite)
    try:
        given = rule(safe, max_norm)  # type: ignore[call-arg, operator]
    except TypeError:
        given = rule(safe)  # type: ignore[call-arg, operator]
    if not isinstance(given, Tensor) or given.shape != bounds.shape:
        raise UsageError(
            f"a clipping rule must return {tuple(bounds.shape)} coefficients",
            fix="rule(norms, max_norm) -> tensor of the same shape",
        )
    if not bool(torch.isfinite(given).all()) or bool((given < 0).any()):
        raise UsageError("a clipping rule returned a negative or non-finite coefficient")
    limited = torch.minimum(given.to(bounds.dtype), max_norm / safe)
    return torch.where(finite, limited, 0.0)
