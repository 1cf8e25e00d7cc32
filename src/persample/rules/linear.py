"""Products and distances of rows with a parameter: linear, matmul, experts, code books."""

from __future__ import annotations

import torch
from torch import Tensor

from ..forms import Dense, Form, Outer, Part, Pieces, Replay, wide
from ..layouts import Layout, place_in_groups, product_equation, remap, spell_terms
from ..uses import Firing, Operand, Use
from .broadcast import unbroadcast
from .contraction import contraction, of_term
from .table import (
    Forms,
    OfTable,
    Unsuited,
    by_sample,
    factor,
    only_operand,
    only_output,
    row_ids,
    rule,
)


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


def _shift(left: Tensor, grad: Tensor, layout: Layout, operand: Operand, n: int) -> Form | OfTable:
    """The gradient of what was added to every position of a factor: (n, o).

    torch broadcasts it: it may have another shape than (o).
    """
    if operand.value.shape != grad.shape[-1:] or operand.expanded:
        return unbroadcast(grad, layout, operand, n)
    if left.dim() == 2:
        return Dense(left)
    if left.shape[1] == 1:
        return Dense(left[:, 0])
    return Dense(left.sum(1, dtype=wide(left.dtype)), made=True)


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
            found.append(_shift(left, grad, layout, operand, n))
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
    *data, mine, out = spell_terms("...i,...j,oij->...o", (x, y, weight), grad.dim())
    found: Forms = []
    for operand in use.operands:
        if operand.value is bias:
            found.append(_shift(factor(grad, layout, n), grad, layout, operand, n))
        elif operand.value is weight and operand.value is not x and operand.value is not y:
            others = list(zip((x, y), data, strict=True))
            found.append(of_term((weight, mine), others, (grad, out), layout, n))
        else:
            raise Unsuited
    return found


@rule("matmul mm bmm mv linalg_matmul rmatmul")
def matmul(use: Use, firing: Firing, n: int) -> Forms:
    """One factor is the parameter."""
    a, b = use.bind(firing, "input", "other")
    if b is None or a is b:
        raise Unsuited
    if use.operator == "rmatmul":
        a, b = b, a
    return [_product(a, b, only_operand(use), *only_output(use, firing), n)]


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
            found.append(unbroadcast(seed, layout, operand, n))
        else:
            scaled = grad * alpha if alpha != 1 else grad
            found.append(_product(a, b, operand, scaled, layout, n))
    return found


@rule("_grouped_mm grouped_mm")
def grouped_mm(use: Use, firing: Firing, n: int) -> Forms:
    """X (r, i) with r sorted by expert, weight (e, i, o), offsets (e): one Outer per expert."""
    x, weight, offsets = use.bind(firing, "input", "mat2", "offs")
    grad, layout = only_output(use, firing)
    if x.dim() != 2 or only_operand(use, weight).value.dim() != 3 or offsets is None:
        raise Unsuited
    routed = _Routed(row_ids(grad, layout, n, 1), offsets, n)
    if not any(routed.longest):
        raise Unsuited
    _, i, o = weight.shape
    mine, theirs = routed.rows(x), routed.rows(grad)
    parts = [
        Part(Outer(mine[e], theirs[e], torch.Size((i, o))), weight.shape, (o, 1), e * i * o)
        for e in mine
    ]
    return [Pieces(parts) if len(parts) > 1 else parts[0]]


class _Routed:
    """Where the rows of every expert and sample go: sorted once for both factors."""

    def __init__(self, ids: Tensor, offsets: Tensor, n: int) -> None:
        rows = torch.arange(ids.numel(), device=ids.device)
        expert = torch.searchsorted(offsets.to(rows), rows, right=True)
        self.used = ((ids >= 0) & (expert < offsets.numel())).nonzero().flatten()  # not padding
        self.sample, self.expert = ids[self.used], expert[self.used]
        self.place, counts = place_in_groups(self.expert * n + self.sample, offsets.numel() * n)
        self.longest: list[int] = counts.view(-1, n).amax(1).tolist() if n else []
        self.n = n

    def rows(self, rows: Tensor) -> dict[int, Tensor]:
        """(n, longest of the expert, width) of every expert that has rows."""
        lengths = torch.tensor(self.longest, device=rows.device)
        starts = (lengths.cumsum(0) - lengths) * self.n
        at = starts[self.expert] + self.sample * lengths[self.expert] + self.place
        out = rows.new_zeros(self.n * sum(self.longest), rows.shape[1])
        out.index_copy_(0, at, rows[self.used])
        each = out.split([self.n * length for length in self.longest])
        return {
            e: part.view(self.n, length, rows.shape[1])
            for e, (part, length) in enumerate(zip(each, self.longest, strict=True))
            if length
        }


@rule("cdist")
def cdist(use: Use, firing: Firing, n: int) -> Forms:
    """Two matrices; batches of matrices broadcast."""
    one, two, power, mode = use.bind(firing, "x1", "x2", "p", "compute_mode")
    (grad, layout), operand = only_output(use, firing), only_operand(use)
    matrices = grad.dim() == one.dim() == two.dim() == 2
    if not matrices or operand.expanded or grad.dtype != wide(grad.dtype):
        raise Unsuited
    data = one
    if operand.value is one:
        data, grad, layout = two, grad.mT, remap(layout, [1, 0], 2)
    rows, seeds = by_sample(data, layout, n, 1), by_sample(grad, layout, n, 1)
    shared = operand.value
    options = [2.0 if power is None else power, *([] if mode is None else [mode])]

    def pull(rows: Tensor, copies: Tensor, seeds: Tensor) -> Tensor:
        with torch.enable_grad():
            copies = copies.detach().requires_grad_()
            out = use.run((rows, copies, *options), {}, ())
        return torch.autograd.grad(out, copies, seeds)[0]

    def each(first: int, last: int) -> Tensor:
        copies = shared.expand(last - first, *shared.shape)
        return pull(rows[first:last], copies, seeds[first:last])

    def added(c: Tensor) -> Tensor:
        scaled = seeds * c.to(seeds.dtype).view(-1, 1, 1)
        return pull(rows.flatten(0, 1), shared, scaled.flatten(0, 1))

    if n * shared.numel() <= rows.numel() + seeds.numel():
        return [Dense(each(0, n))]
    return [Replay(each, added, n, shared, [rows, seeds])]
