"""Normalisation layers: Σₜ x̂ₜ ⊙ gₜ for the scale, Σₜ gₜ for the shift."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..forms import Dense, wide
from ..layouts import remap
from ..uses import Firing, Use
from .table import Forms, Unsuited, by_sample, only_output, rule

_FEW = 8  # positions that are faster added up than multiplied by a row
_PIECE = 1 << 17  # numbers that are multiplied at a time
_LARGE = 1 << 15  # numbers of a sample that torch's own kernel takes faster, one sample at a time


def _statistics(node: str, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Means and reciprocal deviations of the input, if the operator's node is about to run.

    Rules are called before the node of the operator itself, which has kept them. In half precision
    they are rounded, and better computed again.
    """
    current: Any = torch._C._current_autograd_node()
    if current is None or current.name() != node or x.dtype != wide(x.dtype):
        return None
    seen: Tensor = current._saved_input
    if seen.data_ptr() != x.data_ptr() or seen.shape != x.shape or seen.dtype != x.dtype:
        return None  # autocast made a tensor of its own
    mean, rstd = current._saved_result1, current._saved_result2
    return (mean, rstd) if mean.dtype == rstd.dtype == x.dtype else None


def _trailing(
    use: Use, firing: Firing, n: int, weight: Tensor | None, x: Tensor, *rest: Tensor
) -> Forms:
    """Scale and shift over the last axes: ``rest`` is the scale of each row, after its mean."""
    grad, layout = only_output(use, firing)
    if grad.is_complex():
        raise Unsuited
    dtype, (*mean, rstd) = wide(torch.promote_types(grad.dtype, x.dtype)), rest
    keep = use.operands[0].value.dim()
    rows = by_sample(grad, layout, n, keep)
    scaled = [operand.value is weight for operand in use.operands]
    each = [by_sample(t, layout, n, keep).to(dtype) for t in (x, rstd, *mean) if any(scaled)]
    large = rows.device.type == "cpu" and rows[0].numel() >= _LARGE
    if large and mean and any(scaled) and rows.dtype == dtype:
        found = _one_by_one(rows, *each, shifts=not all(scaled))
        return [Dense(found[not scale]) for scale in scaled]
    return [
        Dense(_scale_gradients(rows, *each) if scale else rows.sum(1, dtype=dtype), made=True)
        for scale in scaled
    ]


def _one_by_one(
    grad: Tensor, x: Tensor, rstd: Tensor, mean: Tensor, *, shifts: bool
) -> list[Tensor]:
    """Gradients of the scale and, if they are wanted, of the shift, by torch's own kernel."""
    shape, wanted = x.shape[2:], [False, True, shifts]
    weight = x.new_empty(shape)  # of which the kernel takes the shape
    # the kernel reads memory in order
    samples = zip(*(t.contiguous() for t in (grad, x, mean, rstd)), strict=True)
    found = [
        torch.ops.aten.native_layer_norm_backward(g, a, shape, m, r, weight, weight, wanted)[1:]
        for g, a, m, r in samples
    ]
    return [torch.stack(each) for each in zip(*found, strict=True) if each[0] is not None]


def _scale_gradients(grad: Tensor, x: Tensor, rstd: Tensor, mean: Tensor | None = None) -> Tensor:
    """Σₜ rstdₜ (xₜ − meanₜ) ⊙ gradₜ of (n, t, …) and (n, t, 1, …)."""
    n, t = x.shape[:2]
    if t < _FEW:  # a product for every sample costs more than it computes
        return (x if mean is None else x - mean).mul(rstd).mul_(grad).sum(1)
    out = x.new_empty(n, 1, x.shape[2:].numel())
    # on the CPU in pieces that stay in its cache: fresh memory costs as much as the products
    size = max(1, _PIECE * n // max(1, x.numel()) if x.device.type == "cpu" else n)
    for first in range(0, n, size):
        some = slice(first, first + size)
        product = x[some] * grad[some] if mean is None else (x[some] - mean[some]).mul_(grad[some])
        torch.bmm(rstd[some].reshape(-1, 1, t), product.flatten(2), out=out[some])
    return out.view(n, *x.shape[2:])


@rule("layer_norm")
def layer_norm(use: Use, firing: Firing, n: int) -> Forms:
    """Over the trailing axes."""
    x, shape, weight, _, eps = use.bind(
        firing, "input", "normalized_shape", "weight", "bias", "eps"
    )
    found = _statistics("NativeLayerNormBackward0", x)
    if found is None:
        eps, x = 1e-5 if eps is None else eps, x.to(wide(x.dtype))
        found = torch.native_layer_norm(x, shape, None, None, eps)[1:]
    return _trailing(use, firing, n, weight, x, *found)


@rule("rms_norm")
def rms_norm(use: Use, firing: Firing, n: int) -> Forms:
    """Over the trailing axes, without a mean."""
    x, shape, weight, eps = use.bind(firing, "input", "normalized_shape", "weight", "eps")
    axes, data = [d - len(shape) for d in range(len(shape))], x.to(wide(x.dtype))
    sizes = torch.linalg.vector_norm(data, dim=axes, keepdim=True).square_()
    eps = torch.finfo(data.dtype).eps if eps is None else eps
    rstd = sizes.div_(math.prod(shape)).add_(eps).rsqrt_()
    return _trailing(use, firing, n, weight, data, rstd)


@rule("group_norm")
def group_norm(use: Use, firing: Firing, n: int) -> Forms:
    """Channels on axis 1."""
    x, groups, weight, _, eps = use.bind(firing, "input", "num_groups", "weight", "bias", "eps")
    return _group_scale_and_shift(use, firing, n, weight, x, groups, 1e-5 if eps is None else eps)


@rule("instance_norm")
def instance_norm(use: Use, firing: Firing, n: int) -> Forms:
    """Statistics of the input, or running ones."""
    x, weight, _, mean, var, own, _, eps = use.bind(
        firing, "input", "weight", "bias", "running_mean", "running_var", "use_input_stats",
        "momentum", "eps",
    )  # fmt: skip
    if own:
        return _group_scale_and_shift(use, firing, n, weight, x, x.shape[1], eps)
    return _channels(use, firing, weight, _normalize_by_running(x, mean, var, eps), n)


@rule("batch_norm")
def batch_norm(use: Use, firing: Firing, n: int) -> Forms:
    """With running statistics; in training mode all that is normalised is one sample's."""
    x, weight, _, mean, var, training, _, eps = use.bind(
        firing, "input", "weight", "bias", "running_mean", "running_var", "training", "momentum",
        "eps",
    )  # fmt: skip
    if training:  # running statistics have been updated, once
        normalised = F.batch_norm(x, None, None, training=True, eps=eps)
    else:
        normalised = _normalize_by_running(x, mean, var, eps)
    return _channels(use, firing, weight, normalised, n)


def _group_scale_and_shift(
    use: Use, firing: Firing, n: int, weight: Tensor | None, x: Tensor, groups: int, eps: float
) -> Forms:
    """Every image's own scale and shift by torch's kernel, as if all were channels of one image."""
    grad, layout = only_output(use, firing)
    if any(layout.axes) or grad.dim() < 2 or not grad.numel():
        data = x.contiguous().to(wide(x.dtype))
        return _channels(use, firing, weight, F.group_norm(data, groups, eps=eps), n)
    images, channels = grad.shape[:2]
    dtype = wide(torch.promote_types(grad.dtype, x.dtype))
    found = _statistics("NativeGroupNormBackward0", x)
    # the kernels read memory in order: reshape alone may keep the strides of a view
    data = x.to(dtype).reshape(1, images * channels, -1).contiguous()
    sizes = (1, images * channels, data.shape[2], images * groups)
    if found is None:
        found = torch.native_group_norm(data, None, None, *sizes, eps)[1:]
    mean, rstd = (f.reshape(1, -1) for f in found)
    seed = grad.to(dtype).reshape(data.shape).contiguous()
    rows = torch.ops.aten.native_group_norm_backward(
        seed, data, mean, rstd, data.new_ones(sizes[1]), *sizes, [False, True, True]
    )[1:]
    moved = remap(layout, [0, 1] + [None] * (grad.dim() - 2), 2)
    return [
        Dense(by_sample(each.view(images, channels), moved, n, 1).sum(1), made=True)
        for each in [rows[operand.value is not weight] for operand in use.operands]
    ]


def _normalize_by_running(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    view = [1, -1] + [1] * (x.dim() - 2)
    return (x - mean.view(view)) * (var + eps).rsqrt().view(view)


def _channels(use: Use, firing: Firing, weight: Tensor | None, normalised: Tensor, n: int) -> Forms:
    """Channels on axis 1; spatial axes are summed at once unless they hold samples."""
    grad, layout = only_output(use, firing)
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
        found.append(Dense(rows.sum(1, dtype=wide(grad.dtype)), made=True))
    return found
