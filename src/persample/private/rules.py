"""Clipping rules of a plan, and the same with weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..tape.clipping import automatic, flat, per_group, per_layer


def rule_of(clipping: str) -> Any:
    """The engine's rule of a plan's word."""
    return {
        "flat": flat,
        "automatic": automatic,
        "per_layer": per_layer(),
    }[clipping]


def weighted(clipping: str, weights: Tensor, names: Sequence[str]) -> Any:
    """The rule's coefficients times weights (n,) between 0 and 1."""
    plain = automatic if clipping == "automatic" else flat

    def within(norms: Tensor, bound: float) -> Tensor:
        return plain(norms, bound) * weights.to(norms)

    if clipping == "per_layer":
        return per_group([[name] for name in names], within=within)
    return within
