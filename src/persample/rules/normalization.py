"""Normalisation layers: Σₜ x̂ₜ ⊙ gₜ for the scale, Σₜ gₜ for the shift."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..forms import Dense, wide
from ..layout import Layout, remap
from ..use import Firing, Use
from .rows import Unsuited, by_sample
from .table import Forms, rule


def _forms(
    use: Use,
    weight: Tensor | None,
    normalised: Tensor,
    grad: Tensor,
    layout: Layout,
    n: int,
    keep: int,
) -> Forms:
    """Scale and shift over the last ``keep`` axes."""
    found: Forms = []
    for operand in use.operands:
        dtype = wide(grad.dtype)
        product = grad * normalised.to(grad.dtype) if operand.value is weight else grad
        rows = by_sample(product, layout, n, keep)
        found.append(Dense(rows.sum(1, dtype=dtype).reshape(n, *operand.value.shape)))
    return found


@rule("layer_norm")
def layer_norm(use: Use, firing: Firing, n: int) -> Forms:
    """Over the trailing axes."""
    x, shape, weight, _, eps = use.bind(
        firing, "input", "normalized_shape", "weight", "bias", "eps"
    )
    grad = _only(firing)
    normalised = F.layer_norm(x.to(wide(x.dtype)), shape, None, None, 1e-5 if eps is None else eps)
    return _forms(use, weight, normalised, grad, use.out_layouts[0], n, len(shape))


@rule("rms_norm")
def rms_norm(use: Use, firing: Firing, n: int) -> Forms:
    """Over the trailing axes, without a mean."""
    x, shape, weight, eps = use.bind(firing, "input", "normalized_shape", "weight", "eps")
    grad = _only(firing)
    normalised = F.rms_norm(x, shape, None, eps)
    return _forms(use, weight, normalised, grad, use.out_layouts[0], n, len(shape))


@rule("group_norm")
def group_norm(use: Use, firing: Firing, n: int) -> Forms:
    """Channels on axis 1."""
    x, groups, weight, _, eps = use.bind(firing, "input", "num_groups", "weight", "bias", "eps")
    grad = _only(firing)
    normalised = F.group_norm(
        x.contiguous().to(wide(x.dtype)), groups, None, None, 1e-5 if eps is None else eps
    )
    return _channels(use, weight, normalised, grad, n)


@rule("instance_norm")
def instance_norm(use: Use, firing: Firing, n: int) -> Forms:
    """Statistics of the input, or running ones."""
    x, weight, _, mean, var, own, _, eps = use.bind(
        firing, "input", "weight", "bias", "running_mean", "running_var", "use_input_stats",
        "momentum", "eps",
    )  # fmt: skip
    normalised = F.instance_norm(x, eps=eps) if own else _fixed(x, mean, var, eps)
    return _channels(use, weight, normalised, _only(firing), n)


@rule("batch_norm")
def batch_norm(use: Use, firing: Firing, n: int) -> Forms:
    """With running statistics (training mode has been refused)."""
    x, weight, _, mean, var, training, _, eps = use.bind(
        firing, "input", "weight", "bias", "running_mean", "running_var", "training", "momentum",
        "eps",
    )  # fmt: skip
    if training:
        raise Unsuited
    return _channels(use, weight, _fixed(x, mean, var, eps), _only(firing), n)


def _fixed(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    view = [1, -1] + [1] * (x.dim() - 2)
    return (x - mean.view(view)) * (var + eps).rsqrt().view(view)


def _channels(use: Use, weight: Tensor | None, normalised: Tensor, grad: Tensor, n: int) -> Forms:
    """Channels on axis 1; spatial axes are summed at once unless they hold samples."""
    layout = use.out_layouts[0]
    rank = grad.dim()
    if 1 in layout.axes or rank < 2:
        raise Unsuited
    flat = all(d == 0 for d in layout.axes)
    places = [0, 1] + [None] * (rank - 2) if flat else [0, rank - 1, *range(1, rank - 1)]
    moved = remap(layout, places, 2 if flat else rank)
    found: Forms = []
    for operand in use.operands:
        product = grad * normalised.to(grad.dtype) if operand.value is weight else grad
        if rank > 2 and flat:
            product = product.flatten(2).sum(2, dtype=wide(grad.dtype))
        elif rank > 2:
            product = product.movedim(1, -1)
        rows = by_sample(product, moved, n, 1)
        found.append(Dense(rows.sum(1, dtype=wide(grad.dtype))))
    return found


def _only(firing: Firing) -> Tensor:
    grad = firing.grads[0]
    if grad is None:
        raise Unsuited
    return grad
