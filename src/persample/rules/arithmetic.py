"""Broadcasting arithmetic with a parameter: scales, biases, positions, class tokens, LayerScale."""

from __future__ import annotations

import torch
from torch import Tensor

from ..forms import Dense, wide
from ..layout import Layout
from ..use import Firing, Operand, Use
from .embedding import looked_up
from .rows import Unsuited
from .table import Forms, rule


def reduced(grad: Tensor, layout: Layout, operand: Operand, n: int) -> Tensor:
    """The output gradient summed to the operand's shape, but not over samples: (n, *shape).

    An operand expanded over the samples is one value for all of them, so its rows are the
    gradient's own; the axis is summed away within each sample.
    """
    shape = operand.value.shape
    shift = grad.dim() - len(shape)
    if shift < 0:
        raise Unsuited
    free = operand.expanded
    over = [
        d
        for d in range(grad.dim())
        if d < shift or (shape[d - shift] == 1 and grad.shape[d] != 1) or (d - shift) in free
    ]
    spread = [
        d for d in layout.axes if d >= shift and shape[d - shift] != 1 and d - shift not in free
    ]
    if spread and n != 1:
        raise Unsuited
    target = [1 if d in free else s for d, s in enumerate(shape)]
    dtype = wide(grad.dtype)
    if layout.ids is None:
        return _closed(grad, layout, over, n, dtype).reshape(n, *target)
    return _ragged(grad, layout, over, n, dtype).reshape(n, *target)


def _closed(grad: Tensor, layout: Layout, over: list[int], n: int, dtype: torch.dtype) -> Tensor:
    axis, inner = layout.axis, layout.inner
    if n == 0:
        rest = [s for d, s in enumerate(grad.shape) if d not in over and d != axis]
        return grad.new_zeros((0, *rest), dtype=dtype)
    outer = grad.shape[axis] // (n * inner)
    if outer == inner == 1:
        dims = [d for d in over if d != axis]
        rows = grad.sum(dims, dtype=dtype) if dims else grad.to(dtype)
        return rows.movedim(axis - sum(d < axis for d in dims), 0)
    split = grad.reshape(*grad.shape[:axis], outer, n, inner, *grad.shape[axis + 1 :])
    dims = [axis, axis + 2] + [d if d < axis else d + 2 for d in over if d != axis]
    return split.sum(dims, dtype=dtype).movedim(axis - sum(d < axis for d in dims if d < axis), 0)


def _ragged(grad: Tensor, layout: Layout, over: list[int], n: int, dtype: torch.dtype) -> Tensor:
    axes = layout.axes
    assert layout.ids is not None
    if len(axes) > 1:
        raise Unsuited
    if not axes:  # all of one sample
        rows = grad.sum(over, dtype=dtype) if over else grad.to(dtype)
        out = rows.new_zeros((n, *rows.shape))
        out[int(layout.ids.flatten()[0])] = rows
        return out
    axis = axes[0]
    dims = [d for d in over if d != axis]
    rows = grad.sum(dims, keepdim=True, dtype=dtype) if dims else grad.to(dtype)
    rows = rows.movedim(axis, 0)
    ids = layout.ids.flatten()
    keep = ids >= 0
    out = rows.new_zeros((n, *rows.shape[1:]))
    return out.index_add_(0, ids[keep], rows[keep])


@rule("add sub rsub subtract mul multiply div divide true_divide")
def arithmetic(use: Use, firing: Firing, n: int) -> Forms:
    """The derivative by one operand is elementwise; then it is summed to the operand's shape."""
    a, b = use.bind(firing, "input", "other")
    grad, layout = firing.grads[0], use.out_layouts[0]
    if grad is None or not isinstance(a, (Tensor, int, float)) or a is b:
        raise Unsuited
    alpha = use.option("alpha", 1)
    if use.option("rounding_mode", None) is not None:
        raise Unsuited
    if use.operator == "rsub":
        a, b = b, a
    found: Forms = []
    for operand in use.operands:
        first = operand.value is a
        part = _derivative(use.operator, a, b, grad, first, alpha)
        if operand.lookup is not None and part.shape == operand.value.shape:
            found.append(looked_up(part, layout, operand, n))
            continue
        value = reduced(part, layout, operand, n)
        if not operand.value.is_complex() and value.is_complex():
            value = value.real
        found.append(Dense(value))
    return found


def _derivative(
    operator: str, a: Tensor, b: Tensor, grad: Tensor, first: bool, alpha: float
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
    return -grad * top / b.conj().square()


@rule("cat concat concatenate")
def join(use: Use, firing: Firing, n: int) -> Forms:
    """Each piece gets its part of the output gradient."""
    args, kwargs = use.arguments(firing)
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    grad, layout = firing.grads[0], use.out_layouts[0]
    if grad is None or any(t.dim() != grad.dim() for t in tensors):
        raise Unsuited
    dim %= grad.dim()
    if dim in layout.axes:
        raise Unsuited
    found: Forms = []
    for operand in use.operands:
        at = 0
        for tensor in tensors:
            if tensor is operand.value:
                piece = grad.narrow(dim, at, tensor.shape[dim])
                found.append(Dense(reduced(piece, layout, operand, n)))
                break
            at += tensor.shape[dim]
    return found
