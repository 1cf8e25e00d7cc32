"""Broadcasting arithmetic with a parameter: scales, biases, positions, class tokens, LayerScale."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..forms import Dense
from ..layouts.layout import Layout, remap
from ..uses.use import Firing, Use
from .broadcast import own_of_samples, unbroadcast, unbroadcast_rows
from .by_sample import Unsuited, only_output
from .table import Forms, rule


@rule("add sub rsub subtract mul multiply div divide true_divide")
def arithmetic(use: Use, firing: Firing, n: int) -> Forms:
    """The derivative by one operand is elementwise; then it is summed to the operand's shape."""
    a, b = use.bind(firing, "input", "other")
    grad, layout = only_output(use, firing)
    if not isinstance(a, (Tensor, int, float)) or a is b:
        raise Unsuited
    alpha = use.option("alpha", 1)
    alpha = alpha.conjugate() if isinstance(alpha, complex) else alpha
    if use.option("rounding_mode", None) is not None:
        raise Unsuited
    if use.operator == "rsub":
        a, b = b, a
    parts = [_derivative(use.operator, a, b, grad, o.value is a, alpha) for o in use.operands]
    return [unbroadcast(p, layout, o, n) for p, o in zip(parts, use.operands, strict=True)]


def _derivative(
    operator: str, a: Tensor, b: Tensor, grad: Tensor, first: bool, alpha: complex
) -> Tensor:
    if operator == "add":
        return grad if first or alpha == 1 else grad * alpha
    if operator in ("sub", "subtract", "rsub"):
        return grad if first else -grad * alpha
    if operator in ("mul", "multiply"):
        other = b if first else a
        return grad * (other.conj() if isinstance(other, Tensor) else other)
    if first:
        return grad / (b.conj() if isinstance(b, Tensor) else b)
    top = a.conj() if isinstance(a, Tensor) else a
    return -grad * (top / b.conj() / b.conj())  # the square of a small number may vanish


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
            part, mine = part.squeeze(dim), _without(mine, dim, grad.dim())
        found.append(unbroadcast(part, mine, operand, n))
    return found


def _without(layout: Layout, dim: int, rank: int) -> Layout:
    """The layout when an axis of size one is gone."""
    return remap(layout, [None if d == dim else d - (d > dim) for d in range(rank)], rank - 1)


@rule("prelu")
def prelu(use: Use, firing: Firing, n: int) -> Forms:
    """Slopes run over axis one, or there is one slope for all."""
    x, weight = use.bind(firing, "input", "weight")
    grad, layout = only_output(use, firing)
    if len(use.operands) != 1 or use.operands[0].value is not weight:
        raise Unsuited
    operand, shape = use.operands[0], weight.shape
    if x.dim() > 1:
        operand = copy.copy(operand)
        operand.value, operand.expanded = weight.reshape(-1, *[1] * (x.dim() - 2)), ()
    part = torch.where(x > 0, 0, x * grad)  # not zero times a gradient that is infinite
    if operand.lookup is not None or own_of_samples(part, layout, operand):
        raise Unsuited
    return [Dense(unbroadcast_rows(part, layout, operand, n).reshape(n, *shape))]
