"""The LSTM's time loop for the usual batch: every sequence is as long as every other.

Few operators per step, all on views that were made before the loop: a step costs little more than
its matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Kept = tuple[Tensor, Tensor, Tensor]


def forward(
    order: Sequence[int], gates: Tensor, h0: Tensor, c0: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Kept]:
    """From projected inputs (t, n, 4h), overwritten: outputs, states before, last states, kept."""
    hidden = weight.shape[1]
    outputs, squashed = (gates.new_empty(*gates.shape[:2], hidden) for _ in range(2))
    backwards = len(order) > 0 and order[0] > order[-1]
    cells = gates.new_empty(len(order) + 1, gates.shape[1], hidden)
    cells[-1 if backwards else 0] = c0
    old, new = (cells[1:], cells[:-1]) if backwards else (cells[:-1], cells[1:])
    every, out = gates.unbind(0), outputs.unbind(0)
    two, third, fourth = (
        part.unbind(0) for part in gates.split((2 * hidden, hidden, hidden), dim=2)
    )
    first, second = (part.unbind(0) for part in gates[:, :, : 2 * hidden].chunk(2, dim=2))
    cell, flat = new.unbind(0), squashed.unbind(0)
    turned = weight.t().contiguous()  # many small products read it
    h, c = h0, c0
    for k in order:
        every[k].addmm_(h, turned)
        two[k].sigmoid_()
        third[k].tanh_()
        fourth[k].sigmoid_()
        c = torch.mul(second[k], c, out=cell[k]).addcmul_(first[k], third[k])
        torch.tanh(c, out=flat[k])
        h = torch.mul(fourth[k], flat[k], out=out[k])
    start = h0.unsqueeze(0)
    before = torch.cat([outputs[1:], start] if backwards else [start, outputs[:-1]])
    return outputs, before, h.clone(), c.clone(), (gates, old, squashed)


def backward(
    order: Sequence[int], grads: Sequence[Tensor], weight: Tensor, kept: Kept
) -> tuple[Tensor, Tensor, Tensor]:
    """Gate gradients (t, n, 4h) and the gradients of the first states."""
    hidden, steps = weight.shape[1], list(reversed(order))
    delta, into = _local(hidden, *kept)
    every, most = delta.unbind(0), delta[:, :, : 3 * hidden].unflatten(2, (3, hidden)).unbind(0)
    last, douts = delta[:, :, 3 * hidden :].unbind(0), grads[0].unbind(0)
    keep = kept[0][:, :, hidden : 2 * hidden].unbind(0)
    now, cell = grads[1] + douts[steps[0]], grads[2].clone()
    wide = cell.unsqueeze(1)
    for k, following in zip(steps, [*steps[1:], None], strict=True):
        cell.addcmul_(now, into[k])
        most[k].mul_(wide)
        last[k].mul_(now)
        cell.mul_(keep[k])
        if following is not None:
            torch.addmm(douts[following], every[k], weight, out=now)
    return delta, torch.mm(every[steps[-1]], weight), cell


def _local(
    hidden: int, gates: Tensor, cells: Tensor, squashed: Tensor
) -> tuple[Tensor, Sequence[Tensor]]:
    """Derivatives of each step alone, where its gate gradients will be; and those into the cell."""
    i, f, n, o = gates.split(hidden, dim=2)
    delta = torch.empty_like(gates)
    first, second, third, fourth = delta.split(hidden, dim=2)
    aten = torch.ops.aten
    aten.sigmoid_backward(n, i, grad_input=first)
    aten.sigmoid_backward(cells, f, grad_input=second)
    aten.tanh_backward(i, n, grad_input=third)
    aten.sigmoid_backward(squashed, o, grad_input=fourth)
    return delta, aten.tanh_backward(o, squashed).unbind(0)
