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
    outputs = gates.new_empty(*gates.shape[:2], hidden)
    cells, squashed = torch.empty_like(outputs), torch.empty_like(outputs)
    every, out = gates.unbind(0), outputs.unbind(0)
    two, third, fourth = (
        part.unbind(0) for part in gates.split((2 * hidden, hidden, hidden), dim=2)
    )
    first, second = (part.unbind(0) for part in gates[:, :, : 2 * hidden].chunk(2, dim=2))
    cell, flat, turned = cells.unbind(0), squashed.unbind(0), weight.t()
    h, c = h0, c0
    for k in order:
        every[k].addmm_(h, turned)
        two[k].sigmoid_()
        third[k].tanh_()
        fourth[k].sigmoid_()
        c = torch.mul(second[k], c, out=cell[k]).addcmul_(first[k], third[k])
        torch.tanh(c, out=flat[k])
        h = torch.mul(fourth[k], flat[k], out=out[k])
    before = shifted(order, outputs, h0)
    return outputs, before, h.clone(), c.clone(), (gates, shifted(order, cells, c0), squashed)


def shifted(order: Sequence[int], states: Tensor, start: Tensor) -> Tensor:
    """The state before every step."""
    if len(order) and order[0] > order[-1]:
        return torch.cat([states[1:], start.unsqueeze(0)])
    return torch.cat([start.unsqueeze(0), states[:-1]])


def backward(
    order: Sequence[int], grads: Sequence[Tensor], weight: Tensor, kept: Kept
) -> tuple[Tensor, Tensor, Tensor]:
    """Gate gradients (t, n, 4h) and the gradients of the first states."""
    gates, cells, squashed = kept
    hidden = weight.shape[1]
    i, f, n, o = gates.split(hidden, dim=2)
    delta = torch.empty_like(gates)
    local = torch.empty(*gates.shape[:2], 3, hidden, dtype=gates.dtype, device=gates.device)
    torch.mul(n, i * (1 - i), out=local[:, :, 0])
    torch.mul(cells, f * (1 - f), out=local[:, :, 1])
    torch.mul(i, 1 - n * n, out=local[:, :, 2])
    into = (o * (1 - squashed * squashed)).unbind(0)
    outward = (squashed * (o * (1 - o))).unbind(0)
    every, most = delta.unbind(0), delta[:, :, : 3 * hidden].unflatten(2, (3, hidden)).unbind(0)
    last, locals_, keep, douts = (
        delta[:, :, 3 * hidden :].unbind(0), local.unbind(0), f.unbind(0), grads[0].unbind(0)
    )  # fmt: skip
    now, dh, cell = torch.empty_like(grads[1]), grads[1].clone(), grads[2].clone()
    wide = cell.unsqueeze(1)
    for k in reversed(order):
        torch.add(dh, douts[k], out=now)
        cell.addcmul_(now, into[k])
        torch.mul(locals_[k], wide, out=most[k])
        torch.mul(now, outward[k], out=last[k])
        torch.mm(every[k], weight, out=dh)
        cell.mul_(keep[k])
    return delta, dh, cell
