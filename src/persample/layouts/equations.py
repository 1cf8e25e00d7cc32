"""Products spelled as ``einsum`` spells them: a letter for each axis."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from string import ascii_letters

from torch import Tensor


def product_equation(a: int, b: int) -> str:
    """``a @ b`` of tensors of these ranks."""
    left, right = "...yz" if a > 1 else "z", "...zx" if b > 1 else "z"
    return f"{left},{right}->...{left[3:4]}{right[4:]}"


@functools.lru_cache(maxsize=1024)
def places_of(letters: str, result: str) -> tuple[int | None, ...]:
    """Where each axis is in the result; of a repeated letter (a diagonal), no axis is followed."""
    return tuple(
        result.index(c) if c in result and letters.count(c) == 1 else None for c in letters
    )


def spell_terms(equation: str, terms: Sequence[Tensor], rank: int) -> tuple[str, ...]:
    """Every term's letters and those of the result, of this rank, without dots."""
    return _spell(equation, tuple([tensor.dim() for tensor in terms]), rank)


@functools.lru_cache(maxsize=1024)
def _spell(equation: str, ranks: tuple[int, ...], rank: int) -> tuple[str, ...]:
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        once = sorted(c for c in set(letters) if letters.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    spare = "".join(c for c in ascii_letters if c not in equation)
    spelled = []
    for each, size in zip([*left.split(",")[: len(ranks)], right], [*ranks, rank], strict=True):
        width = size - len(each.replace("...", ""))
        spelled.append(each.replace("...", spare[len(spare) - width :] if width else ""))
    return tuple(spelled)
