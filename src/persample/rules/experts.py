"""Grouped matrix products: rows routed to experts, each expert a block of one parameter."""

from __future__ import annotations

import torch

from ..forms import Form, Outer, Part, Total
from ..use import Firing, Use
from .rows import Unsuited, padded, row_ids
from .table import Forms, rule


@rule("_grouped_mm grouped_mm")
def grouped_mm(use: Use, firing: Firing, n: int) -> Forms:
    """X (r, i) with r sorted by expert, weight (e, i, o), offsets (e): one Outer per expert."""
    x, weight, offsets = use.bind(firing, "input", "mat2", "offs")
    if offsets is None:
        offsets = use.arguments(firing)[1].get("offs")
    grad, layout = firing.grads[0], use.out_layouts[0]
    if grad is None or x.dim() != 2 or weight.dim() != 3 or len(use.operands) != 1:
        raise Unsuited
    if use.operands[0].value is not weight or offsets is None:
        raise Unsuited
    ids = row_ids(grad, layout, n, 1)
    bounds = [0, *offsets.tolist()]
    experts, i, o = weight.shape
    strides = (o, 1)
    parts: list[Form] = []
    for e in range(experts):
        first, last = bounds[e], bounds[e + 1]
        if last > first:
            rows = ids[first:last]
            left = padded(x[first:last], rows, n)
            right = padded(grad[first:last], rows, n)
            form = Outer(left, right, torch.Size((i, o)))
            parts.append(Part(form, weight.shape, strides, e * i * o))
    if not parts:
        raise Unsuited
    return [parts[0] if len(parts) == 1 else Total(parts)]
