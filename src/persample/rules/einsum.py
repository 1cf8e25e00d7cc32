"""Sums over letters with a parameter among the terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from ..forms import Dense, Form, wide
from ..layouts.equations import product_equation, spell_terms
from ..layouts.layout import Layout
from ..uses.use import Firing, Use
from .by_sample import Unsuited, by_sample, only_output
from .contraction import contraction, move_layout
from .table import Forms, rule


@rule("einsum")
def einsum(use: Use, firing: Firing, n: int) -> Forms:
    """Two terms are one contraction; of more, those that are no parameter are multiplied first."""
    args, _ = use.arguments(firing)
    equation, terms = args[0], args[1] if isinstance(args[1], (list, tuple)) else args[1:]
    grad, layout = only_output(use, firing)
    if not isinstance(equation, str) or len(terms) < 2:
        raise Unsuited
    *letters, out = spell_terms(equation, terms, grad.dim())
    if any(len(set(each)) != len(each) for each in letters):
        raise Unsuited
    found: Forms = []
    for operand in use.operands:
        mine = [k for k, term in enumerate(terms) if term is operand.value]
        if len(mine) != 1 or operand.expanded:
            raise Unsuited
        others = list(zip(terms, letters, strict=True))
        weight = others.pop(mine[0])
        found.append(_of_one(weight, others, (grad, out), layout, n))
    return found


Term = tuple[Tensor, str]


def _of_one(weight: Term, others: list[Term], result: Term, layout: Layout, n: int) -> Form:
    """The form of one term."""
    if len(others) == 1:
        return contraction(*others[0], *weight, *result, layout, n)
    (grad, out), mine = result, weight[1]
    if grad.is_complex() or any(term.is_complex() for term, _ in others):
        raise Unsuited
    samples = {out[d] for d in layout.axes}
    far = _farthest(others, set(mine) - set(out), samples)
    near = [result, *(each for k, each in enumerate(others) if k != far)]
    theirs = set() if far is None else set(others[far][1])
    kept = _letters(near, set(mine) | theirs | samples)
    left = _product(near, kept)
    where = move_layout(layout, out, kept)
    if far is None:
        return _written_out(weight, left, kept, where, n)
    data = _letters([others[far]], set(mine) | set(kept))
    return contraction(_product([others[far]], data), data, *weight, left, kept, where, n)


def _farthest(others: list[Term], wanted: set[str], samples: set[str]) -> int | None:
    """The samples' term with most of the letters that the result has not: the second factor."""
    fit = [k for k, (_, each) in enumerate(others) if samples <= set(each) and wanted & set(each)]
    return max(fit, default=None, key=lambda k: _size(others[k], wanted))


def _size(term: Term, wanted: set[str]) -> int:
    sizes = (s for s, c in zip(term[0].shape, term[1], strict=True) if c in wanted)
    return math.prod(sizes)


def _letters(terms: Sequence[Term], wanted: set[str]) -> str:
    return "".join(c for c in dict.fromkeys("".join(each for _, each in terms)) if c in wanted)


def _product(terms: Sequence[Term], kept: str) -> Tensor:
    """Terms multiplied, other letters summed; not where the product is far larger than they are."""
    dtype = reduce(torch.promote_types, [wide(tensor.dtype) for tensor, _ in terms])
    tensors = [tensor.to(dtype) for tensor, _ in terms]
    sizes = {c: s for t, each in terms for c, s in zip(each, t.shape, strict=True) if s != 1}
    if math.prod(sizes.get(c, 1) for c in kept) > max(8 * sum(t.numel() for t in tensors), 1 << 20):
        raise Unsuited
    return torch.einsum(f"{','.join(each for _, each in terms)}->{kept}", tensors)


def _written_out(weight: Term, left: Tensor, kept: str, layout: Layout, n: int) -> Form:
    """Everything but the weight, summed to its letters."""
    value, mine = weight
    sizes = dict(zip(kept, left.shape, strict=True))
    if any(sizes.get(c) != size for c, size in zip(mine, value.shape, strict=True)):
        raise Unsuited
    if any(kept[d] in mine for d in layout.axes):
        raise Unsuited
    order = [c for c in kept if c not in mine] + list(mine)
    where = [kept.index(c) for c in order]
    places = "".join(order)
    rows = by_sample(left.permute(where), move_layout(layout, kept, places), n, len(mine))
    return Dense(rows.sum(1).view(n, *value.shape))


def parameter_axes(use: Use, firing: Firing, rank: int) -> set[int] | None:
    """The result's axes that belong to the parameter of a product; None if it is not a factor."""
    args, kwargs = use.arguments(firing)
    if use.operator == "einsum":
        equation, terms = args[0], list(args[1] if isinstance(args[1], (list, tuple)) else args[1:])
        if len(terms) != 2 or not isinstance(equation, str):
            return None
    else:
        both = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)][-2:]
        terms = both[::-1] if use.operator == "rmatmul" else both
        equation = product_equation(terms[0].dim(), terms[1].dim())
    letters = spell_terms(equation, terms, rank)
    mine = [k for k, term in enumerate(terms) if any(o.value is term for o in use.operands)]
    if len(mine) != 1:
        return None
    return {d for d, c in enumerate(letters[2]) if c in letters[mine[0]]}
