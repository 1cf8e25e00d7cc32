"""Recurrent layers by a time loop of our own, with the gate gradients in reach.

Rows are packed: all active sequences of step 0, then of step 1, and so on. A padded batch is the
special case in which every step has the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import even_lstm

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
Sink = Callable[[Tensor, Tensor], None]


class Steps:
    """Where each step's rows are, in the order in which a direction visits them."""

    __slots__ = ("order", "rows", "sizes")

    def __init__(self, sizes: list[int], reverse: bool) -> None:
        at = 0
        self.rows = []
        for size in sizes:
            self.rows.append((at, at + size))
            at += size
        self.order = list(range(len(sizes)))
        if reverse:
            self.order.reverse()
        self.sizes = sizes

    def even(self) -> bool:
        """Whether every step has the same number of rows."""
        return bool(self.sizes) and self.sizes[0] == self.sizes[-1] > 0

    def visited(self) -> list[tuple[int, int]]:
        """First and last row of every step, in the order of the direction."""
        return [self.rows[k] for k in self.order]


class Recurrence(torch.autograd.Function):
    """One layer and direction, from input projections to outputs.

    ``u`` is (rows, gates · hidden), the projected input with its bias. The hidden projection uses
    ``weight`` and ``bias``; what their uses need (states before, gate gradients) goes to ``sink``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        kind: str,
        steps: Steps,
        sink: Sink,
        u: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Any:
        """Outputs of all rows, last hidden state, last cell state (LSTM)."""
        run = {"lstm": _lstm, "gru": _gru}.get(kind, _plain)
        outputs, before, last, cell, kept = run(kind, steps, u, h0, c0, weight, bias)
        ctx.kind, ctx.steps, ctx.sink = kind, steps, sink
        ctx.save_for_backward(before, weight, *kept)
        ctx.cell = cell is not None
        ctx.set_materialize_grads(True)
        return (outputs, last, cell) if cell is not None else (outputs, last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Through time; the gate gradients are handed to the sink."""
        before, weight, *kept = ctx.saved_tensors
        run = {"lstm": _lstm_backward, "gru": _gru_backward}.get(ctx.kind, _plain_backward)
        with torch._C.DisableTorchFunction():
            du, dhidden, dh, dc = run(ctx.kind, ctx.steps, grads, before, weight, kept)
            ctx.sink(before, dhidden)
        return None, None, None, None, du, dh, dc, None, None


def _active(state: Tensor, size: int) -> Tensor:
    return state if state.shape[0] == size else state[:size]


def put(state: Tensor, size: int, value: Tensor) -> Tensor:
    """The state after a step in which the first ``size`` sequences were active."""
    if size == state.shape[0]:
        return value
    state = state.clone()
    state[:size] = value
    return state


def _lstm(
    kind: str,
    steps: Steps,
    u: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> Any:
    assert c0 is not None
    hidden = weight.shape[1]
    if steps.even():
        gates = u.detach()  # nobody else needs the projected input
        if bias is not None:
            gates += bias
        split = gates.view(len(steps.sizes), -1, gates.shape[1])
        *found, kept = even_lstm.forward(steps.order, split, h0, c0, weight)
        return *(t.flatten(0, 1) for t in found[:2]), *found[2:], [t.flatten(0, 1) for t in kept]
    gates = u + bias if bias is not None else u.clone()
    outputs, before = u.new_empty(u.shape[0], hidden), u.new_empty(u.shape[0], hidden)
    cells, squashed = torch.empty_like(outputs), torch.empty_like(outputs)
    h, c, turned = h0.clone(), c0.clone(), weight.t()
    for first, last in steps.visited():
        size = last - first
        g, old_h, old_c = gates[first:last], _active(h, size), _active(c, size)
        before[first:last] = old_h
        cells[first:last] = old_c
        g.addmm_(old_h, turned)
        g[:, : 2 * hidden].sigmoid_()
        g[:, 2 * hidden : 3 * hidden].tanh_()
        g[:, 3 * hidden :].sigmoid_()
        i, f, n, o = g.split(hidden, 1)
        new_c = torch.addcmul(f * old_c, i, n)
        torch.tanh(new_c, out=squashed[first:last])
        torch.mul(o, squashed[first:last], out=outputs[first:last])
        h, c = put(h, size, outputs[first:last]), put(c, size, new_c)
    return outputs, before, h.clone(), c.clone(), (gates, cells, squashed)


def _lstm_backward(
    kind: str, steps: Steps, grads: tuple[Tensor, ...], before: Tensor, weight: Tensor, kept: Any
) -> Any:
    if steps.even():
        t = len(steps.sizes)
        gates, cells, squashed = (k.view(t, -1, k.shape[1]) for k in kept)
        given = (grads[0].reshape(t, -1, grads[0].shape[1]), *grads[1:])
        delta, dh, dc = even_lstm.backward(steps.order, given, weight, (gates, cells, squashed))
        return delta.flatten(0, 1), delta.flatten(0, 1), dh, dc
    gates, cells, squashed = kept
    hidden = weight.shape[1]
    i, f, n, o = gates.split(hidden, 1)
    into_cell = o * (1 - squashed * squashed)
    local = torch.cat([n * i * (1 - i), cells * f * (1 - f), i * (1 - n * n)], 1)
    outward = squashed * o * (1 - o)
    delta = torch.empty_like(gates)
    dout, dh, dc = grads[0], grads[1].clone(), grads[2].clone()
    for first, last in reversed(steps.visited()):
        size = last - first
        now = _active(dh, size) + dout[first:last]
        cell = torch.addcmul(_active(dc, size), now, into_cell[first:last])
        d = delta[first:last]
        torch.mul(
            local[first:last].view(size, 3, hidden), cell.unsqueeze(1),
            out=d[:, : 3 * hidden].view(size, 3, hidden),
        )  # fmt: skip
        torch.mul(now, outward[first:last], out=d[:, 3 * hidden :])
        dh, dc = put(dh, size, d @ weight), put(dc, size, cell * f[first:last])
    return delta, delta, dh, dc


def _gru(
    kind: str,
    steps: Steps,
    u: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> Any:
    hidden = weight.shape[1]
    outputs, before = u.new_empty(u.shape[0], hidden), u.new_empty(u.shape[0], hidden)
    gates, inner = u.clone(), torch.empty_like(outputs)
    h, turned = h0.clone(), weight.t()
    for first, last in steps.visited():
        size = last - first
        old = _active(h, size)
        before[first:last] = old
        z = old @ turned if bias is None else torch.addmm(bias, old, turned)
        g = gates[first:last]
        g[:, : 2 * hidden] += z[:, : 2 * hidden]
        g[:, : 2 * hidden].sigmoid_()
        inner[first:last] = z[:, 2 * hidden :]
        r, update = g[:, :hidden], g[:, hidden : 2 * hidden]
        new = g[:, 2 * hidden :].addcmul_(r, inner[first:last]).tanh_()
        outputs[first:last] = torch.lerp(new, old, update)
        h = put(h, size, outputs[first:last])
    return outputs, before, h.clone(), None, (gates, inner)


def _gru_backward(
    kind: str, steps: Steps, grads: tuple[Tensor, ...], before: Tensor, weight: Tensor, kept: Any
) -> Any:
    gates, inner = kept
    hidden = weight.shape[1]
    delta, other = torch.empty_like(gates), torch.empty_like(gates)
    dout, dh = grads[0], grads[1].clone()
    for first, last in reversed(steps.visited()):
        size = last - first
        r, z, new = gates[first:last].split(hidden, 1)
        now = _active(dh, size) + dout[first:last]
        dnew = now * (1 - z) * (1 - new * new)
        dz = now * (before[first:last] - new) * z * (1 - z)
        dr = dnew * inner[first:last] * r * (1 - r)
        delta[first:last] = torch.cat([dr, dz, dnew], 1)
        other[first:last] = torch.cat([dr, dz, dnew * r], 1)
        dh = put(dh, size, torch.addmm(now * z, other[first:last], weight))
    return delta, other, dh, None


def _plain(
    kind: str,
    steps: Steps,
    u: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> Any:
    hidden = weight.shape[1]
    outputs = u + bias if bias is not None else u.clone()
    before = u.new_empty(u.shape[0], hidden)
    h, turned = h0.clone(), weight.t()
    for first, last in steps.visited():
        size = last - first
        old = _active(h, size)
        before[first:last] = old
        g = outputs[first:last].addmm_(old, turned)
        g.tanh_() if kind == "rnn_tanh" else g.relu_()
        h = put(h, size, g)
    return outputs, before, h.clone(), None, (outputs,)


def _plain_backward(
    kind: str, steps: Steps, grads: tuple[Tensor, ...], before: Tensor, weight: Tensor, kept: Any
) -> Any:
    (outputs,) = kept
    delta = torch.empty_like(outputs)
    dout, dh = grads[0], grads[1].clone()
    local = 1 - outputs * outputs if kind == "rnn_tanh" else (outputs > 0).to(outputs.dtype)
    for first, last in reversed(steps.visited()):
        now = _active(dh, last - first) + dout[first:last]
        torch.mul(now, local[first:last], out=delta[first:last])
        dh = put(dh, last - first, delta[first:last] @ weight)
    return delta, delta, dh, None
