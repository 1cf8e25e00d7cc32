"""One backward pass for all samples: the operator runs on copies of the parameter, one for each.

If a parameter is repeated along the axis of the samples, and an operator keeps samples there
separate, then the gradient of copy i is the gradient of sample i. Whether it does is
decided by its layout rule: the copies are treated as samples, and the result must have the
layout that it has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..forms import lift, lower, scratch
from ..layouts import POINTWISE, Layout, State, closed, find, ids_of, propagate
from ..uses import Firing, Operand, Use
from .broadcast import unbroadcast
from .table import Forms, Unsuited

_BATCHED = frozenset(("scaled_dot_product_attention", "cdist"))  # matrices behind a batch's axes
_AROUND = frozenset(("cosine_similarity", "pairwise_distance"))  # one axis is summed away
_KNOWN = POINTWISE | _BATCHED | _AROUND | {"max", "min"}


def by_expanded_copies(use: Use, firing: Firing, n: int) -> Forms:
    """One form per operand, where the operator can be run on copies."""
    grad, operator = firing.grads[0], find(use.func)
    plain = len(firing.grads) == 1 and use.rng is None and operator.rule is not None
    if grad is None or not plain or operator.name != use.operator or not n:
        raise Unsuited
    layout = use.out_layouts[0]
    shapes = [_shape_of_copies(use, firing, operand, grad, layout, n) for operand in use.operands]
    try:
        copies = [
            (operand.value.detach().expand(shape).requires_grad_(), where)
            for operand, (shape, where) in zip(use.operands, shapes, strict=True)
        ]
        found = _gradients(use, firing, grad, copies, n)
    except (RuntimeError, ValueError, TypeError, IndexError):  # it does not broadcast this one
        raise Unsuited from None
    return [
        None if part is None else unbroadcast(part, where, operand, n)
        for operand, part, (_, where) in zip(use.operands, found, copies, strict=True)
    ]


def _shape_of_copies(
    use: Use, firing: Firing, operand: Operand, grad: Tensor, layout: Layout, n: int
) -> tuple[torch.Size, Layout]:
    """The shape of an operand with a copy for every sample, and where they are."""
    name, value = use.operator, operand.value
    two = name in ("max", "min") and all(
        isinstance(t, Tensor) for t in use.bind(firing, "input", "other")
    )
    if name in POINTWISE or two:
        if value.dim() == 0 and value.dtype != grad.dtype:
            raise Unsuited  # a number does not decide the result's dtype, copies of it would
        return grad.shape, layout
    if name in _AROUND and layout.ids is None:
        return _around(use, firing, layout)
    found = None
    if name in _BATCHED and value.dim() > 1 and grad.dim() > 2:
        if all(d < grad.dim() - 2 for d in layout.axes):
            found = _batch_matrices(value, grad), layout
    else:
        axes = [d for d in operand.expanded if value.shape[d] == n]
        found = (value.shape, closed(axes[0])) if axes else None
    held = sum(t.nbytes for t in firing.saved) + grad.nbytes
    if found is None or found[0].numel() * grad.element_size() > max(4 * held, scratch()):
        raise Unsuited
    return found


def _batch_matrices(value: Tensor, grad: Tensor) -> torch.Size:
    """Matrices for all of a batch; where there are several already (heads), they stay as many."""
    own = (*[1] * (grad.dim() - value.dim()), *value.shape)
    lead = [size if size != 1 else all_ for size, all_ in zip(own[:-2], grad.shape, strict=False)]
    return torch.Size((*lead, *value.shape[-2:]))


def _around(use: Use, firing: Firing, layout: Layout) -> tuple[torch.Size, Layout]:
    """Both arguments in full, with the axis that is summed away."""
    axis, keep = -1, False
    if use.operator == "cosine_similarity":
        one, two, given = use.bind(firing, "x1", "x2", "dim")
        axis = 1 if given is None else given
    else:
        one, two, _, _, keep = use.bind(firing, "x1", "x2", "p", "eps", "keepdim")
    if not isinstance(one, Tensor) or not isinstance(two, Tensor) or keep:
        raise Unsuited
    shape = torch.broadcast_shapes(one.shape, two.shape)
    axis %= len(shape)
    return shape, closed(layout.axis + (layout.axis >= axis), layout.inner)


def _gradients(
    use: Use, firing: Firing, grad: Tensor, copies: list[tuple[Tensor, Layout]], n: int
) -> list[Tensor | None]:
    """Of every copy, if the samples among them are kept separate."""
    saved = [t.detach() for t in firing.saved]
    values = [copy for copy, _ in copies]
    with torch.enable_grad():
        args, kwargs, leaves = use.call(saved, values)
        out = use.run(args, kwargs, saved)
    fits = isinstance(out, Tensor) and out.shape == grad.shape and out.requires_grad
    if not fits or out.dtype != use.tapped.dtypes[0]:
        raise Unsuited
    coloured: list[tuple[Tensor, State]] = [
        (leaves[k], layout)
        for k, layout in zip(use.kind.data, use.kind.layouts, strict=True)
        if layout is not None
    ]
    for operand, (_, where) in zip(use.operands, copies, strict=True):
        coloured.append((leaves[operand.position], where))  # written in place: a copy of the copy
    if n != 1:
        state = propagate(find(use.func), use.func, args, kwargs, out.detach(), coloured, n)
        if not isinstance(state, Layout) or not _alike(state, use.out_layouts[0], grad, n):
            raise Unsuited
    up = lift([grad], use.narrow())
    seed = (grad.detach() if up is None else grad.detach() * up).to(out.dtype)
    if n > 1 and use.operator not in _KNOWN:
        _expect_separate(out, seed, use.out_layouts[0], copies, n)
    found = torch.autograd.grad(out, values, seed, allow_unused=True)
    return [None if part is None else lower(part, up) for part in found]


def _expect_separate(
    out: Tensor, seed: Tensor, layout: Layout, copies: list[tuple[Tensor, Layout]], n: int
) -> None:
    """One sample's gradient must not reach the others' copies: what was proven, seen once."""
    mine = ids_of(layout, out.shape, n, out.device) == n - 1
    values = [copy for copy, _ in copies]
    one = torch.where(mine, seed, torch.zeros((), dtype=seed.dtype, device=seed.device))
    found = torch.autograd.grad(out, values, one, retain_graph=True, allow_unused=True)
    for part, (copy, where) in zip(found, copies, strict=True):
        others = ids_of(where, copy.shape, n, copy.device) != n - 1
        if part is not None and bool(part.masked_fill(~others, 0).any()):
            raise Unsuited


def _alike(one: Layout, two: Layout, grad: Tensor, n: int) -> bool:
    """Whether two layouts say the same."""
    ids = (ids_of(each, grad.shape, n, grad.device).expand(grad.shape) for each in (one, two))
    return one is two or torch.equal(*ids)
