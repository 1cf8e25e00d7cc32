"""Contractions of data with a parameter, whatever they are called; sums over letters (einsum).

Letters of the parameter: k shared with data and output (blocks), i contracted with data, o only in
the output. Letters of the data besides: positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from ..forms import Dense, Form, Outer, Part, wide
from ..layouts import (
    Layout,
    contiguous_strides,
    einsum_terms,
    product_equation,
    remap,
    spell_terms,
)
from ..uses import Firing, Use
from .table import Forms, Unsuited, by_sample, only_output, rule


def contraction(
    x: Tensor, data: str, weight: Tensor, mine: str, grad: Tensor, out: str, layout: Layout, n: int
) -> Form:
    """The form of ``weight`` in ``einsum(f"{data},{mine}->{out}", x, weight)``."""
    shape = weight.shape
    if 1 in shape or 1 in x.shape:
        x, data, weight, mine = _drop_repeated(x, data, weight, mine, out)
    _check(x, data, weight, mine, grad, out)
    if grad.is_complex() and not weight.is_complex():  # the weight's gradient is its real part
        raise Unsuited
    x = x.conj() if x.is_complex() else x
    if any((c in data) + (c in mine) + (c in out) < 2 for c in data + mine + out):
        raise Unsuited  # summed in one term alone, or repeated
    k = [c for c in mine if c in data and c in out]
    i = [c for c in mine if c in data and c not in out]
    o = [c for c in mine if c not in data and c in out]
    positions = [c for c in out if c not in mine]
    left = _arrange(grad, out, positions, k, o, layout, n)
    axis_layout = move_layout(layout, out, data)
    right = _arrange(x, data, positions, k, i, axis_layout, n)
    order = k + o + i
    if [*mine] == order:
        return Outer(left, right, shape)
    if [*mine] == k + i + o:
        return Outer(right, left, shape)
    sizes = dict(zip(mine, weight.shape, strict=True))
    strides = dict(zip(mine, contiguous_strides(weight.shape), strict=True))
    form = Outer(left, right, torch.Size(sizes[c] for c in order))
    return Part(form, shape, tuple(strides[c] for c in order), 0)


def _drop_repeated(
    x: Tensor, data: str, weight: Tensor, mine: str, out: str
) -> tuple[Tensor, str, Tensor, str]:
    """Both terms without axes of size one that are repeated.

    A capsule's matrices (1, i, c, a, b) multiply vectors (n, i, 1, b, 1): they are repeated over
    the samples, the vectors over c.
    """
    for d in reversed([d for d, s in enumerate(weight.shape) if s == 1]):
        if mine[d] in data and mine[d] in out:
            weight, mine = weight.select(d, 0), mine[:d] + mine[d + 1 :]
    sizes = dict(zip(mine, weight.shape, strict=False))
    for d in reversed([d for d, s in enumerate(x.shape) if s == 1]):
        if sizes.get(data[d], 1) != 1:
            x, data = x.select(d, 0), data[:d] + data[d + 1 :]
    return x, data, weight, mine


def _check(x: Tensor, data: str, weight: Tensor, mine: str, grad: Tensor, out: str) -> None:
    sizes: dict[str, int] = {}
    for tensor, letters in ((x, data), (weight, mine), (grad, out)):
        for letter, size in zip(letters, tensor.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise Unsuited


def move_layout(layout: Layout, out: str, data: str) -> Layout:
    """The output's layout on the data's axes (the samples' axis is a position of both)."""
    places = [data.index(c) if c in data else None for c in out]
    return remap(layout, places, len(data))


def _arrange(
    x: Tensor,
    letters: str,
    positions: list[str],
    k: list[str],
    last: list[str],
    layout: Layout,
    n: int,
) -> Tensor:
    """(n, k, t, last): samples first, then blocks, positions, and the matrix axis."""
    order = "".join([*positions, *k, *last])
    if any(letters[d] not in positions for d in layout.axes):
        raise Unsuited
    moved = x.permute([letters.index(c) for c in order])
    rows = by_sample(moved, move_layout(layout, letters, order), n, len(k) + len(last))
    blocks, width = (math.prod(x.shape[letters.index(c)] for c in each) for each in (k, last))
    return rows.reshape(rows.shape[0], rows.shape[1], blocks, width).transpose(1, 2)


@rule("einsum")
def einsum(use: Use, firing: Firing, n: int) -> Forms:
    """Two terms are one contraction; of more, those that are no parameter are multiplied first."""
    args, _ = use.arguments(firing)
    equation, terms = einsum_terms(args)
    grad, layout = only_output(use, firing)
    if len(terms) < 2:
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
        found.append(of_term(weight, others, (grad, out), layout, n))
    return found


Term = tuple[Tensor, str]


def of_term(weight: Term, others: list[Term], result: Term, layout: Layout, n: int) -> Form:
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
    order = "".join(c for c in kept if c not in mine) + mine
    where = [kept.index(c) for c in order]
    rows = by_sample(left.permute(where), move_layout(layout, kept, order), n, len(mine))
    return Dense(rows.sum(1).view(n, *value.shape))


def parameter_axes(use: Use, firing: Firing, rank: int) -> set[int] | None:
    """The result's axes that belong to the parameter of a product; None if it is not a factor."""
    args, kwargs = use.arguments(firing)
    if use.operator == "einsum":
        equation, terms = einsum_terms(args)
    else:
        both = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)][-2:]
        terms = both[::-1] if use.operator == "rmatmul" else both
        equation = product_equation(terms[0].dim(), terms[1].dim())
    if len(terms) != 2:
        return None
    letters = spell_terms(equation, terms, rank)
    mine = [k for k, term in enumerate(terms) if any(o.value is term for o in use.operands)]
    if len(mine) != 1:
        return None
    return {d for d, c in enumerate(letters[2]) if c in letters[mine[0]]}
