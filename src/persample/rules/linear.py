"""Matrix products with a parameter: linear, matmul and its relatives, einsum.

All of them are one contraction. Letters of the parameter: k shared with data and output (blocks),
i contracted with data, o only in the output. Letters of the data besides: positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..forms import Dense, Form, Outer, Part, wide
from ..layout import Layout, remap
from ..use import Firing, Operand, Use
from .arithmetic import reduced
from .rows import Unsuited, by_sample, factor
from .table import Forms, rule


def contraction(
    x: Tensor, data: str, weight: Tensor, mine: str, grad: Tensor, out: str, layout: Layout, n: int
) -> Form:
    """The form of ``weight`` in ``einsum(f"{data},{mine}->{out}", x, weight)``."""
    shape = weight.shape
    if x.dim() != len(data) or weight.dim() != len(mine):
        raise Unsuited
    if 1 in shape or 1 in x.shape:
        x, data, weight, mine = _unrepeated(x, data, weight, mine, out)
    _check(x, data, weight, mine, grad, out)
    x = x.conj() if x.is_complex() else x
    for letter in data:  # summed over the data alone
        if letter not in mine and letter not in out:
            raise Unsuited
    k = [c for c in mine if c in data and c in out]
    i = [c for c in mine if c in data and c not in out]
    o = [c for c in mine if c not in data and c in out]
    positions = [c for c in out if c not in mine]
    if len(k) + len(i) + len(o) != len(mine) or len(positions) != len(out) - len(k) - len(o):
        raise Unsuited
    if any(c not in data for c in positions):  # an axis of the result that the weight repeats
        raise Unsuited
    left = _arranged(grad, out, positions, k, o, layout, n)
    axis_layout = _moved(layout, out, data)
    right = _arranged(x, data, positions, k, i, axis_layout, n)
    sizes = dict(zip(mine, weight.shape, strict=True))
    if "".join(mine) == "".join(k + o + i):
        return Outer(left, right, shape)
    if "".join(mine) == "".join(k + i + o):
        return Outer(right, left, shape)
    order = k + o + i
    form = Outer(left, right, torch.Size(sizes[c] for c in order))
    strides = dict(zip(mine, _contiguous(weight.shape), strict=True))
    return Part(form, shape, tuple(strides[c] for c in order), 0)


def _unrepeated(
    x: Tensor, data: str, weight: Tensor, mine: str, out: str
) -> tuple[Tensor, str, Tensor, str]:
    """Both terms without axes of size one that are repeated.

    A capsule's matrices (1, i, c, a, b) meet vectors (n, i, 1, b, 1): they are repeated over the
    samples, the vectors over c.
    """
    for d in reversed([d for d, s in enumerate(weight.shape) if s == 1]):
        if mine[d] in data and mine[d] in out:
            weight, mine = weight.select(d, 0), mine[:d] + mine[d + 1 :]
    sizes = dict(zip(mine, weight.shape, strict=False))
    for d in reversed([d for d, s in enumerate(x.shape) if s == 1]):
        if sizes.get(data[d], 1) != 1:
            x, data = x.select(d, 0), data[:d] + data[d + 1 :]
    return x, data, weight, mine


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def _check(x: Tensor, data: str, weight: Tensor, mine: str, grad: Tensor, out: str) -> None:
    sizes: dict[str, int] = {}
    for tensor, letters in ((x, data), (weight, mine), (grad, out)):
        if len(set(letters)) != len(letters) or tensor.dim() != len(letters):
            raise Unsuited
        for letter, size in zip(letters, tensor.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise Unsuited


def _moved(layout: Layout, out: str, data: str) -> Layout:
    """The output's layout on the data's axes (the samples' axis is a position of both)."""
    places = [data.index(c) if c in data else None for c in out]
    return remap(layout, places, len(data))


def _arranged(
    x: Tensor,
    letters: str,
    positions: list[str],
    k: list[str],
    last: list[str],
    layout: Layout,
    n: int,
) -> Tensor:
    """(n, k, t, last): samples first, then blocks, positions, and the matrix axis."""
    order = [*positions, *k, *last]
    if any(letters[d] not in positions for d in layout.axes):
        raise Unsuited
    where = [letters.index(c) for c in order]
    places = [0] * len(order)
    for new, old in enumerate(where):
        places[old] = new
    moved = x.permute(where)
    rows = by_sample(moved, remap(layout, places, len(order)), n, len(k) + len(last))
    blocks = 1
    for c in k:
        blocks *= x.shape[letters.index(c)]
    width = 1
    for c in last:
        width *= x.shape[letters.index(c)]
    rows = rows.reshape(rows.shape[0], rows.shape[1], blocks, width)
    return rows.transpose(1, 2)


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def product_letters(a: int, b: int) -> tuple[str, str, str]:
    """Letters of ``a @ b`` for tensors of these ranks (batch axes broadcast from the right)."""
    if a == 0 or b == 0:
        raise Unsuited
    batch = _LETTERS[: max(a - 2, b - 2, 0)]
    left = batch[len(batch) - max(a - 2, 0) :] + ("yz" if a > 1 else "z")
    right = batch[len(batch) - max(b - 2, 0) :] + ("zx" if b > 1 else "z")
    out = batch + ("y" if a > 1 else "") + ("x" if b > 1 else "")
    return left, right, out


def _product(a: Tensor, b: Tensor, operand: Operand, grad: Tensor, layout: Layout, n: int) -> Form:
    if operand.value is b and b.dim() == 2 and a.dim() > 1 and not a.is_complex():
        return Outer(factor(a, layout, n), factor(grad, layout, n), b.shape)
    left, right, out = product_letters(a.dim(), b.dim())
    data, theirs, mine = (b, right, left) if operand.value is a else (a, left, right)
    weight, free = operand.value, operand.expanded
    for d in reversed(free):  # one matrix for all samples, not one for each
        weight, mine = weight.select(d, 0), mine[:d] + mine[d + 1 :]
    form = contraction(data, theirs, weight, mine, grad, out, layout, n)
    if free:
        form.shape = torch.Size(1 if d in free else s for d, s in enumerate(operand.value.shape))
    return form


def _shift(left: Tensor) -> Dense:
    """The gradient of what was added to every position of a factor: (n, o)."""
    if left.dim() == 2:
        return Dense(left)
    return Dense(left.sum(1, dtype=wide(left.dtype)) if left.shape[1] != 1 else left[:, 0])


@rule("linear")
def linear(use: Use, firing: Firing, n: int) -> Forms:
    """X (…, i), weight (o, i), bias (o)."""
    x, weight, bias = use.bind(firing, "input", "weight", "bias")
    grad, layout = firing.grads[0], use.out_layouts[0]
    if grad is None or weight.dim() != 2:
        raise Unsuited
    left = factor(grad, layout, n)
    found: Forms = []
    for operand in use.operands:
        if operand.value is x:
            raise Unsuited
        if operand.value is bias:
            found.append(_shift(left))
        else:
            right = factor(x.conj() if x.is_complex() else x, layout, n)
            found.append(Outer(left, right, weight.shape))
    return found


@rule("bilinear")
def bilinear(use: Use, firing: Firing, n: int) -> Forms:
    """X (…, i), y (…, j), weight (o, i, j), bias (o): products of x and y meet the gradient."""
    x, y, weight, bias = use.bind(firing, "input1", "input2", "weight", "bias")
    grad, layout = firing.grads[0], use.out_layouts[0]
    if grad is None or grad.is_complex():
        raise Unsuited
    left = factor(grad, layout, n)
    found: Forms = []
    for operand in use.operands:
        if operand.value is bias:
            found.append(_shift(left))
        elif operand.value is weight and operand.value is not x and operand.value is not y:
            if left.dim() > 2 and left.shape[1] > weight.shape[0]:
                raise Unsuited  # products of every position would be larger than the rows
            both = (x.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)
            found.append(Outer(left, factor(both, layout, n), weight.shape))
        else:
            raise Unsuited
    return found


@rule("matmul mm bmm mv linalg_matmul rmatmul")
def matmul(use: Use, firing: Firing, n: int) -> Forms:
    """One factor is the parameter."""
    a, b = use.bind(firing, "input", "other")
    if b is None:
        raise Unsuited
    if use.operator == "rmatmul":
        a, b = b, a
    grad = firing.grads[0]
    if grad is None or len(use.operands) != 1 or a is b:
        raise Unsuited
    return [_product(a, b, use.operands[0], grad, use.out_layouts[0], n)]


@rule("addmm baddbmm addmv")
def addmm(use: Use, firing: Firing, n: int) -> Forms:
    """Beta · base + alpha · a @ b."""
    base, a, b = use.bind(firing, "input", "mat1", "mat2")
    grad, layout = firing.grads[0], use.out_layouts[0]
    if grad is None or a is None or b is None:
        raise Unsuited
    alpha, beta = use.option("alpha", 1), use.option("beta", 1)
    found: Forms = []
    for operand in use.operands:
        if operand.value is base:
            seed = grad * beta if beta != 1 else grad
            plain = layout.ids is None and layout.axis < grad.dim() - 1
            if plain and base.shape == grad.shape[-1:]:  # a bias of every row
                found.append(_shift(factor(seed, layout, n)))
            else:
                found.append(Dense(reduced(seed, layout, operand, n)))
        else:
            scaled = grad * alpha if alpha != 1 else grad
            found.append(_product(a, b, operand, scaled, layout, n))
    return found


def parameter_axes(use: Use, firing: Firing, rank: int) -> set[int] | None:
    """The result's axes that belong to the parameter of a product; None if it is not a factor."""
    args, kwargs = use.arguments(firing)
    if use.operator == "einsum":
        terms = list(args[1] if isinstance(args[1], (list, tuple)) else args[1:])
        if len(terms) != 2 or not isinstance(args[0], str):
            return None
        letters = spelled(args[0], terms, rank)
    else:
        both = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)][-2:]
        terms = both[::-1] if use.operator == "rmatmul" else both
        letters = product_letters(terms[0].dim(), terms[1].dim())
    mine = [k for k, term in enumerate(terms) if any(o.value is term for o in use.operands)]
    if len(mine) != 1:
        return None
    return {d for d, c in enumerate(letters[2]) if c in letters[mine[0]]}


@rule("einsum")
def einsum(use: Use, firing: Firing, n: int) -> Forms:
    """Two operands, one of them the parameter."""
    args, _ = use.arguments(firing)
    equation, terms = args[0], args[1] if isinstance(args[1], (list, tuple)) else args[1:]
    grad = firing.grads[0]
    if grad is None or len(terms) != 2 or len(use.operands) != 1 or terms[0] is terms[1]:
        raise Unsuited
    first, second, out = spelled(equation, terms, grad.dim())
    a, b = terms
    operand = use.operands[0]
    layout = use.out_layouts[0]
    if operand.value is a:
        return [contraction(b, second, a, first, grad, out, layout, n)]
    return [contraction(a, first, b, second, grad, out, layout, n)]


def spelled(equation: str, terms: Sequence[Tensor], rank: int) -> tuple[str, str, str]:
    """The equation with an arrow and without dots."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        once = sorted(c for c in set(letters) if letters.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    spare = "ΑΒΓΔΕΖΗΘ"
    found = []
    for term, tensor in zip(inputs, terms, strict=True):
        width = tensor.dim() - len(term.replace("...", ""))
        found.append(term.replace("...", spare[len(spare) - width :] if width else ""))
    width = rank - len(right.replace("...", ""))
    return found[0], found[1], right.replace("...", spare[len(spare) - width :] if width else "")
