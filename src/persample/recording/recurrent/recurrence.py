"""Recurrent layers by a time loop of our own, with the gate gradients in reach.

Rows are packed: all active sequences of step 0, then of step 1, and so on. A padded batch is the
special case in which every step has the same number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...uses import Use
from . import padded_lstm

Step = Callable[[slice, list[Tensor]], Sequence[Tensor]]


class Steps:
    """Where each step's rows are, in the order in which a direction visits them."""

    __slots__ = ("order", "rows", "sizes")

    def __init__(self, sizes: list[int], reverse: bool) -> None:
        ends = itertools.accumulate(sizes)
        self.rows = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self.order = list(range(len(sizes)))[:: -1 if reverse else 1]
        self.sizes = sizes

    def even(self) -> bool:
        """Whether every step has the same number of rows."""
        return bool(self.sizes) and self.sizes[0] == self.sizes[-1] > 0

    def visited(self) -> list[slice]:
        """The rows of every step, in the order of the direction."""
        return [self.rows[k] for k in self.order]


def through(visited: Iterable[slice], states: Sequence[Tensor], step: Step) -> list[Tensor]:
    """Go through time: ``step(rows, states)`` gives the states after its rows.

    The first sequences are active in every step; the states of the others stay as they are.
    """
    for rows in visited:
        size = rows.stop - rows.start
        after = step(rows, [s if s.shape[0] == size else s[:size] for s in states])
        states = [_joined(s, size, new) for s, new in zip(states, after, strict=True)]
    return [s.clone() for s in states]  # not views of what is kept


def _joined(state: Tensor, size: int, new: Tensor) -> Tensor:
    return new if size == state.shape[0] else torch.cat([new, state[size:]])


class Recurrence(torch.autograd.Function):
    """One layer and direction, from input projections to outputs.

    ``u`` is (rows, gates · hidden), the projected input with its bias. The hidden projection uses
    ``weight`` and ``bias``; what their use needs (states before, gate gradients) goes to the first
    of ``uses``. An LSTM with ``proj_size`` projects its hidden state by ``narrow``; what that use
    needs (cells' outputs, gradients of the hidden states) goes to the second.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        kind: str,
        steps: Steps,
        uses: Sequence[Use | None],
        u: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        narrow: Tensor | None,
    ) -> Any:
        """Outputs of all rows, last hidden state, last cell state (LSTM)."""
        run = {"lstm": _lstm, "gru": _gru}.get(kind, _plain)
        outputs, before, last, cell, kept = run(kind, steps, u, h0, c0, weight, bias, narrow)
        ctx.kind, ctx.steps, ctx.uses = kind, steps, uses
        ctx.save_for_backward(before, weight, *kept)
        ctx.set_materialize_grads(True)
        return (outputs, last, cell) if cell is not None else (outputs, last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Through time; gradients of gates and of projected states are handed to the uses."""
        before, weight, *kept = ctx.saved_tensors
        run = {"lstm": _lstm_backward, "gru": _gru_backward}.get(ctx.kind, _plain_backward)
        with torch._C.DisableTorchFunction():
            du, dh, dc, *fired = run(ctx.kind, ctx.steps, grads, before, weight, kept)
            for use, (saved, grad) in zip(ctx.uses, fired, strict=True):
                if use is not None:
                    use.fire((saved,), (grad,))
        return None, None, None, None, du, dh, dc, None, None, None


def _lstm(
    kind: str, steps: Steps, u: Tensor, h0: Tensor, c0: Tensor | None, weight: Tensor,
    bias: Tensor | None, narrow: Tensor | None,
) -> Any:  # fmt: skip
    assert c0 is not None
    if steps.even() and narrow is None:
        gates = u.detach()  # nothing else needs the projected input
        if bias is not None:
            gates += bias
        split = gates.view(len(steps.sizes), -1, gates.shape[1])
        *found, kept = padded_lstm.forward(steps.order, split, h0, c0, weight)
        return *(t.flatten(0, 1) for t in found[:2]), *found[2:], [t.flatten(0, 1) for t in kept]
    hidden = c0.shape[1]
    gates = u + bias if bias is not None else u.clone()
    outputs, before = (u.new_empty(u.shape[0], weight.shape[1]) for _ in range(2))
    cells, squashed = (u.new_empty(u.shape[0], hidden) for _ in range(2))
    turned = weight.t()

    def step(rows: slice, states: list[Tensor]) -> Sequence[Tensor]:
        h, c = states
        before[rows], cells[rows] = h, c
        g = gates[rows].addmm_(h, turned)
        g[:, : 2 * hidden].sigmoid_()
        g[:, 2 * hidden : 3 * hidden].tanh_()
        g[:, 3 * hidden :].sigmoid_()
        i, f, n, o = g.split(hidden, 1)
        new = torch.addcmul(f * c, i, n)
        torch.tanh(new, out=squashed[rows])
        if narrow is not None:
            return torch.mm(o * squashed[rows], narrow.t(), out=outputs[rows]), new
        return torch.mul(o, squashed[rows], out=outputs[rows]), new

    last, cell = through(steps.visited(), [h0, c0], step)
    kept = (gates, cells, squashed)
    return outputs, before, last, cell, kept if narrow is None else (*kept, narrow)


def _lstm_backward(
    kind: str, steps: Steps, grads: tuple[Tensor, ...], before: Tensor, weight: Tensor, kept: Any
) -> Any:
    gates, cells, squashed, *narrow = kept
    if steps.even() and not narrow:
        t = len(steps.sizes)
        gates, cells, squashed = (k.view(t, -1, k.shape[1]) for k in kept)
        given = (grads[0].reshape(t, -1, grads[0].shape[1]), *grads[1:])
        delta, dh, dc = padded_lstm.backward(steps.order, given, weight, (gates, cells, squashed))
        return delta.flatten(0, 1), dh, dc, (before, delta.flatten(0, 1))
    hidden = cells.shape[1]
    i, f, n, o = gates.split(hidden, 1)
    into_cell = o * (1 - squashed * squashed)
    local = torch.cat([n * i * (1 - i), cells * f * (1 - f), i * (1 - n * n)], 1)
    outward = squashed * o * (1 - o)
    delta, projected = torch.empty_like(gates), torch.empty_like(before)

    def step(rows: slice, states: list[Tensor]) -> Sequence[Tensor]:
        now = states[0] + grads[0][rows]
        if narrow:
            projected[rows] = now
            now = now @ narrow[0]
        cell = torch.addcmul(states[1], now, into_cell[rows])
        d, shape = delta[rows], (-1, 3, hidden)
        torch.mul(local[rows].view(shape), cell.unsqueeze(1), out=d[:, : 3 * hidden].view(shape))
        torch.mul(now, outward[rows], out=d[:, 3 * hidden :])
        return d @ weight, cell * f[rows]

    dh, dc = through(reversed(steps.visited()), grads[1:], step)
    more = [(o * squashed, projected)] if narrow else []
    return delta, dh, dc, (before, delta), *more


def _gru(
    kind: str, steps: Steps, u: Tensor, h0: Tensor, c0: Tensor | None, weight: Tensor,
    bias: Tensor | None, narrow: Tensor | None,
) -> Any:  # fmt: skip
    hidden = weight.shape[1]
    outputs, before = u.new_empty(u.shape[0], hidden), u.new_empty(u.shape[0], hidden)
    gates, inner = u.clone(), torch.empty_like(outputs)
    turned = weight.t()

    def step(rows: slice, states: list[Tensor]) -> Sequence[Tensor]:
        (old,) = states
        before[rows] = old
        z = old @ turned if bias is None else torch.addmm(bias, old, turned)
        g = gates[rows]
        g[:, : 2 * hidden] += z[:, : 2 * hidden]
        g[:, : 2 * hidden].sigmoid_()
        inner[rows] = z[:, 2 * hidden :]
        r, update = g[:, :hidden], g[:, hidden : 2 * hidden]
        new = g[:, 2 * hidden :].addcmul_(r, inner[rows]).tanh_()
        return [torch.lerp(new, old, update, out=outputs[rows])]

    (last,) = through(steps.visited(), [h0], step)
    return outputs, before, last, None, (gates, inner)


def _gru_backward(
    kind: str, steps: Steps, grads: tuple[Tensor, ...], before: Tensor, weight: Tensor, kept: Any
) -> Any:
    gates, inner = kept
    hidden = weight.shape[1]
    delta, other = torch.empty_like(gates), torch.empty_like(gates)

    def step(rows: slice, states: list[Tensor]) -> Sequence[Tensor]:
        r, z, new = gates[rows].split(hidden, 1)
        now = states[0] + grads[0][rows]
        dnew = now * (1 - z) * (1 - new * new)
        dz = now * (before[rows] - new) * z * (1 - z)
        dr = dnew * inner[rows] * r * (1 - r)
        torch.cat([dr, dz, dnew], 1, out=delta[rows])
        hidden_delta = torch.cat([dr, dz, dnew * r], 1, out=other[rows])
        return [torch.addmm(now * z, hidden_delta, weight)]

    (dh,) = through(reversed(steps.visited()), grads[1:], step)
    return delta, dh, None, (before, other)


def _plain(
    kind: str, steps: Steps, u: Tensor, h0: Tensor, c0: Tensor | None, weight: Tensor,
    bias: Tensor | None, narrow: Tensor | None,
) -> Any:  # fmt: skip
    outputs = u + bias if bias is not None else u.clone()
    before = u.new_empty(u.shape[0], weight.shape[1])
    turned = weight.t()

    def step(rows: slice, states: list[Tensor]) -> Sequence[Tensor]:
        (old,) = states
        before[rows] = old
        g = outputs[rows].addmm_(old, turned)
        return [g.tanh_() if kind == "rnn_tanh" else g.relu_()]

    (last,) = through(steps.visited(), [h0], step)
    return outputs, before, last, None, (outputs,)


def _plain_backward(
    kind: str, steps: Steps, grads: tuple[Tensor, ...], before: Tensor, weight: Tensor, kept: Any
) -> Any:
    (outputs,) = kept
    delta = torch.empty_like(outputs)
    local = 1 - outputs * outputs if kind == "rnn_tanh" else (outputs > 0).to(outputs.dtype)

    def step(rows: slice, states: list[Tensor]) -> Sequence[Tensor]:
        torch.mul(states[0] + grads[0][rows], local[rows], out=delta[rows])
        return [delta[rows] @ weight]

    (dh,) = through(reversed(steps.visited()), grads[1:], step)
    return delta, dh, None, (before, delta)
