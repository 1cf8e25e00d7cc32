"""The table of rules: operator name -> how the gradients of its uses are represented."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..forms import Form, Rows
from ..uses.use import Firing, Use


@dataclass(frozen=True, slots=True)
class OfTable:
    """An answer for the table behind an operand that was looked up, not for the operand."""

    rows: Rows


Forms = list[Form | OfTable | None]
Rule = Callable[[Use, Firing, int], Forms]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operator names (canonical: ``@`` and ``Tensor.matmul`` are "matmul")."""

    def register(function: Rule) -> Rule:
        for name in names.split():
            if name in RULES:
                raise ValueError(f"two rules for {name}")
            RULES[name] = function
        return function

    return register
