"""A parameter repeated over samples: scales, biases, positions, class tokens, mask tokens.

Gradients are summed to its shape, but not over samples.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from ..forms import Dense, Form, Part, Rows, wide
from ..layouts import Layout, explicit, ids_of, remap, squeeze_colours
from ..uses import Firing, Operand, Use
from .embedding import looked_up
from .table import Forms, OfTable, Unsuited, only_operand, only_output, rule


def unbroadcast(part: Tensor, layout: Layout, operand: Operand, n: int) -> Form | OfTable:
    """The form of an operand from the gradient of its copies, one for every use of an element."""
    if not operand.value.is_complex() and part.is_complex():
        part = part.real
    if operand.lookup is not None and part.shape == operand.value.shape:
        return looked_up(part, layout, operand, n)
    if n != 1 and own_of_samples(part, layout, operand):
        return scatter_rows(part, layout, operand, n)
    return Dense(unbroadcast_rows(part, layout, operand, n))


def _over(grad: Tensor, operand: Operand) -> list[int]:
    """The axes of a result over which an operand was repeated."""
    shape, free = operand.value.shape, operand.expanded
    shift = grad.dim() - len(shape)
    if shift < 0:
        raise Unsuited
    return [
        d
        for d in range(grad.dim())
        if d < shift or (shape[d - shift] == 1 and grad.shape[d] != 1) or (d - shift) in free
    ]


def own_of_samples(grad: Tensor, layout: Layout, operand: Operand) -> list[int]:
    """The axes of a result that hold samples and along which the operand has values of its own."""
    shape, free = operand.value.shape, operand.expanded
    shift = grad.dim() - len(shape)
    return [
        d for d in layout.axes if d >= shift and shape[d - shift] != 1 and d - shift not in free
    ]


def unbroadcast_rows(grad: Tensor, layout: Layout, operand: Operand, n: int) -> Tensor:
    """The output gradient summed to the operand's shape, but not over samples: (n, *shape).

    An operand expanded over the samples is one value for all of them, so its rows are the
    gradient's own; the axis is summed away within each sample.
    """
    shape, free = operand.value.shape, operand.expanded
    over = _over(grad, operand)
    if n != 1 and own_of_samples(grad, layout, operand):
        raise Unsuited
    target = [1 if d in free else s for d, s in enumerate(shape)]
    dtype = wide(grad.dtype)
    if n == 1:  # all of it is one sample's, also along axes where the operand has its own values
        if layout.ids is not None:
            grad = grad.masked_fill(layout.ids < 0, 0)
        return (grad.sum(over, dtype=dtype) if over else grad.to(dtype)).reshape(1, *target)
    add_up = _closed if layout.ids is None else _ragged
    return add_up(grad, layout, over, n, dtype).reshape(n, *target)


def _closed(grad: Tensor, layout: Layout, over: list[int], n: int, dtype: torch.dtype) -> Tensor:
    axis, inner = layout.axis, layout.inner
    outer = grad.shape[axis] // (n * inner)
    split = grad.reshape(*grad.shape[:axis], outer, n, inner, *grad.shape[axis + 1 :])
    every = [axis, axis + 2] + [d if d < axis else d + 2 for d in over if d != axis]
    dims = [d for d in every if split.shape[d] != 1]
    rows = split.sum(dims, keepdim=True, dtype=dtype) if dims else split.to(dtype)
    return rows.movedim(axis + 1, 0)


def _ragged(grad: Tensor, layout: Layout, over: list[int], n: int, dtype: torch.dtype) -> Tensor:
    axes = list(layout.axes)
    assert layout.ids is not None
    dims = [d for d in over if d not in axes]
    rows = grad.sum(dims, keepdim=True, dtype=dtype) if dims else grad.to(dtype)
    rows = rows.movedim(axes, list(range(len(axes))))
    ids = layout.ids.flatten()
    rows = rows.reshape(ids.numel(), *rows.shape[len(axes) :])
    out = rows.new_zeros((n, *rows.shape[1:]))
    return out.index_add_(0, ids[ids >= 0], rows[ids >= 0])


def scatter_rows(grad: Tensor, layout: Layout, operand: Operand, n: int) -> Form:
    """An operand with values of its own for samples: each row of it is some sample's alone.

    Embeddings of constant ids are such operands: one row for each sample and token.
    """
    shift = grad.dim() - operand.value.dim()
    target = [1 if d in operand.expanded else s for d, s in enumerate(operand.value.shape)]
    cut = max(own_of_samples(grad, layout, operand)) + 1
    if any(d >= cut for d in layout.axes):
        raise Unsuited
    tail = [d for d in _over(grad, operand) if d >= cut]
    rows = grad.sum(tail, dtype=wide(grad.dtype)) if tail else grad.to(wide(grad.dtype))
    lead = grad.shape[:cut]
    width = math.prod(rows.shape[cut:])
    rows = rows.reshape(lead.numel(), width)
    ids = ids_of(layout, grad.shape, n, grad.device)
    sample = ids.reshape(ids.shape[:cut]).expand(lead).reshape(-1)
    count = math.prod(target[: cut - shift])
    index = torch.arange(count, device=grad.device).view(target[: cut - shift])
    index = index.expand(lead).reshape(-1)
    rows = rows.masked_fill((sample < 0).unsqueeze(1), 0)
    table = Rows(sample.clamp(min=0), index, rows, n, torch.Size((count, width)))
    return Part(table, torch.Size(target), (width, 1), 0)


@rule("add sub rsub subtract mul multiply div divide true_divide")
def arithmetic(use: Use, firing: Firing, n: int) -> Forms:
    """The derivative by one operand is elementwise; then it is summed to the operand's shape."""
    a, b = use.bind(firing, "input", "other")
    grad, layout = only_output(use, firing)
    alpha = use.option("alpha", 1)
    if not isinstance(a, (Tensor, int, float)) or a is b or use.option("rounding_mode", None):
        raise Unsuited
    if use.operator == "rsub":
        a, b = b, a
    alpha = alpha.conjugate() if isinstance(alpha, complex) else alpha
    one, two = (t.conj() if isinstance(t, Tensor) else t for t in (a, b))
    parts = [_derivative(use.operator, one, two, grad, o.value is a, alpha) for o in use.operands]
    return [unbroadcast(p, layout, o, n) for p, o in zip(parts, use.operands, strict=True)]


def _derivative(
    operator: str, a: Tensor, b: Tensor, grad: Tensor, first: bool, alpha: complex
) -> Tensor:
    """By the first operand or the second, both given as their conjugates."""
    if operator in ("mul", "multiply"):
        return grad * (b if first else a)
    if operator.startswith(("div", "true")):
        return grad / b if first else -grad * (a / b / b)  # a small number's square may vanish
    factor = 1 if first else alpha if operator == "add" else -alpha
    return grad if factor == 1 else grad * factor


@rule("cat concat concatenate stack")
def join(use: Use, firing: Firing, n: int) -> Forms:
    """Each piece gets its part of the output gradient."""
    args, kwargs = use.arguments(firing)
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    grad, layout = only_output(use, firing)
    stacked = use.operator == "stack"
    if any(t.dim() + stacked != grad.dim() for t in tensors):
        raise Unsuited
    dim %= grad.dim()
    if dim in layout.axes and layout.ids is None:
        raise Unsuited
    found: Forms = []
    sizes = [1 if stacked else tensor.shape[dim] for tensor in tensors]
    for operand in use.operands:
        k = next(k for k, tensor in enumerate(tensors) if tensor is operand.value)
        at, size, mine = sum(sizes[:k]), sizes[k], layout
        part = grad.narrow(dim, at, size)
        if layout.ids is not None and dim in layout.axes:
            mine = Layout(0, 1, layout.ids.narrow(dim, at, size))
        if stacked:
            places = [None if d == dim else d - (d > dim) for d in range(grad.dim())]
            part, mine = part.squeeze(dim), remap(mine, places, grad.dim() - 1)
        found.append(unbroadcast(part, mine, operand, n))
    return found


@rule("prelu")
def prelu(use: Use, firing: Firing, n: int) -> Forms:
    """Slopes run over axis one, or there is one slope for all."""
    x, weight = use.bind(firing, "input", "weight")
    grad, layout = only_output(use, firing)
    operand, shape = only_operand(use, weight), weight.shape
    if x.dim() > 1:
        operand = copy.copy(operand)
        operand.value, operand.expanded = weight.reshape(-1, *[1] * (x.dim() - 2)), ()
    part = torch.where(x > 0, 0, x * grad)  # not zero times a gradient that is infinite
    if operand.lookup is not None or own_of_samples(part, layout, operand):
        raise Unsuited
    return [Dense(unbroadcast_rows(part, layout, operand, n).reshape(n, *shape))]


@rule("setitem index_put")
def write(use: Use, firing: Firing, n: int) -> Forms:
    """What was written gets the gradient of where it is."""
    _, index, value = use.bind(firing, "input", "indices", "values")
    (grad, layout), operand = only_output(use, firing), only_operand(use, value)
    if use.operator == "index_put":
        index = tuple(slice(None) if i is None else i for i in index)
    ids = ids_of(layout, grad.shape, n, grad.device).expand(grad.shape)[index]
    where = explicit(squeeze_colours(ids, n), n)
    return [unbroadcast(grad[index], where, operand, n)]


@rule("masked_fill")
def masked_fill(use: Use, firing: Firing, n: int) -> Forms:
    """The value gets the gradient where the mask is true, what is filled gets the other."""
    x, mask = use.bind(firing, "input", "mask")
    grad, layout = only_output(use, firing)
    if not isinstance(mask, Tensor):
        raise Unsuited
    parts = [grad.masked_fill(mask if o.value is x else ~mask, 0) for o in use.operands]
    return [unbroadcast(p, layout, o, n) for p, o in zip(parts, use.operands, strict=True)]
