"""Distances between rows of samples and rows that all of them share: codebooks, prototypes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..forms import Dense, Replay, wide
from ..layouts import remap
from ..uses import Firing, Use
from .table import Forms, Unsuited, by_sample, only_operand, only_output, rule


@rule("cdist")
def cdist(use: Use, firing: Firing, n: int) -> Forms:
    """Two matrices; batches of matrices broadcast."""
    one, two, power, mode = use.bind(firing, "x1", "x2", "p", "compute_mode")
    (grad, layout), operand = only_output(use, firing), only_operand(use)
    if not grad.dim() == one.dim() == two.dim() == 2:
        raise Unsuited
    if operand.expanded or grad.dtype != wide(grad.dtype):
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
