"""Products spelled as ``einsum`` spells them: a letter for each axis."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

from torch import Tensor


def product_equation(a: int, b: int) -> str:
    """``a @ b`` of tensors of these ranks."""
    left, right = "...yz" if a > 1 else "z", "...zx" if b > 1 else "z"
    return f"{left},{right}->...{left[3:4]}{right[4:]}"


def places_of(letters: str, result: str) -> list[int | None]:
    """Where each axis is in the result; of a repeated letter (a diagonal), no axis is followed."""
    return [result.index(c) if c in result and letters.count(c) == 1 else None for c in letters]


def spell_terms(equation: str, terms: Sequence[Tensor], rank: int) -> list[str]:
    """Every term's letters and those of the result, of this rank, without dots."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        once = sorted(c for c in set(letters) if letters.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    spare = "".join(c for c in ascii_letters if c not in equation)
    spelled = []
    ranks = [*(tensor.dim() for tensor in terms), rank]
    for each, size in zip([*left.split(",")[: len(terms)], right], ranks, strict=True):
        width = size - len(each.replace("...", ""))
        spelled.append(each.replace("...", spare[len(spare) - width :] if width else ""))
    return spelled
