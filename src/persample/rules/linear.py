"""Matrix products with a parameter: linear, matmul and its relatives."""

from __future__ import annotations

import torch
from torch import Tensor

from ..forms import Dense, Form, Outer, wide
from ..layouts.equations import product_equation, spell_terms
from ..layouts.layout import Layout
from ..uses.use import Firing, Operand, Use
from .broadcast import unbroadcast_rows
from .by_sample import Unsuited, factor, only_output
from .contraction import contraction
from .table import Forms, rule


def _product(a: Tensor, b: Tensor, operand: Operand, grad: Tensor, layout: Layout, n: int) -> Form:
    if operand.value is b and b.dim() == 2 and a.dim() > 1 and not a.is_complex():
        return Outer(factor(a, layout, n), factor(grad, layout, n), b.shape)
    left, right, out = spell_terms(product_equation(a.dim(), b.dim()), [a, b], grad.dim())
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
    (grad, layout), kind = only_output(use, firing), use.kind
    if kind.data == [0] and kind.template.simple:  # the usual call: by position
        x, bias = firing.saved[0], 2
    else:
        x, weight, shift = use.bind(firing, "input", "weight", "bias")
        if weight.dim() != 2 or any(operand.value is x for operand in use.operands):
            raise Unsuited
        bias = next((o.position for o in use.operands if o.value is shift), -1)
    left = factor(grad, layout, n)
    found: Forms = []
    for operand in use.operands:
        if operand.position == bias:
            found.append(_shift(left))
        elif operand.value.dim() != 2:
            raise Unsuited
        else:
            right = factor(x.conj() if x.is_complex() else x, layout, n)
            found.append(Outer(left, right, operand.value.shape))
    return found


@rule("bilinear")
def bilinear(use: Use, firing: Firing, n: int) -> Forms:
    """X (…, i), y (…, j), weight (o, i, j), bias (o): products of x and y, times the gradient."""
    x, y, weight, bias = use.bind(firing, "input1", "input2", "weight", "bias")
    grad, layout = only_output(use, firing)
    if grad.is_complex():
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
    grad, layout = only_output(use, firing)
    if len(use.operands) != 1 or a is b:
        raise Unsuited
    return [_product(a, b, use.operands[0], grad, layout, n)]


@rule("addmm baddbmm addmv")
def addmm(use: Use, firing: Firing, n: int) -> Forms:
    """Beta · base + alpha · a @ b."""
    base, a, b = use.bind(firing, "input", "mat1", "mat2")
    grad, layout = only_output(use, firing)
    if a is None or b is None:
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
                found.append(Dense(unbroadcast_rows(seed, layout, operand, n)))
        else:
            scaled = grad * alpha if alpha != 1 else grad
            found.append(_product(a, b, operand, scaled, layout, n))
    return found
