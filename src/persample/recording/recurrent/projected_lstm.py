"""LSTM layers whose hidden state is projected to fewer features (``proj_size``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .recurrence import Sink, Steps, through


class ProjectedRecurrence(torch.autograd.Function):
    """One layer and direction: h = P (o ⊙ tanh c), gates from u + W h + b.

    ``u`` is (rows, 4 · cells), the projected input with its bias. What the uses of ``weight`` and
    ``bias`` need (states before, gate gradients) goes to ``sink``, what the uses of ``narrow`` need
    (cells' outputs, gradients of the hidden states) to ``narrow_sink``.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, steps: Steps, sink: Sink, narrow_sink: Sink, u: Tensor,
        h0: Tensor, c0: Tensor, weight: Tensor, bias: Tensor | None,
        narrow: Tensor,
    ) -> Any:  # fmt: skip
        """Outputs of all rows, last hidden state, last cell state."""
        cells = narrow.shape[1]
        gates = u + bias if bias is not None else u.clone()
        outputs = u.new_empty(u.shape[0], narrow.shape[0])
        before = torch.empty_like(outputs)
        old_cells, squashed = u.new_empty(u.shape[0], cells), u.new_empty(u.shape[0], cells)

        def step(rows: slice, states: list[Tensor]) -> Sequence[Tensor]:
            h, c = states
            before[rows], old_cells[rows] = h, c
            i, f, n, o = gates[rows].addmm_(h, weight.t()).split(cells, 1)
            for gate in (i, f, o):
                gate.sigmoid_()
            n.tanh_()
            new = f * c + i * n
            squashed[rows] = new.tanh()
            outputs[rows] = (o * squashed[rows]) @ narrow.t()
            return outputs[rows], new

        h, c = through(steps.visited(), [h0, c0], step)
        ctx.steps, ctx.sinks = steps, (sink, narrow_sink)
        ctx.save_for_backward(before, weight, narrow, gates, old_cells, squashed)
        ctx.set_materialize_grads(True)
        return outputs, h, c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Through time; gradients of gates and of hidden states are handed to the sinks."""
        before, weight, narrow, gates, old_cells, squashed = ctx.saved_tensors
        cells = narrow.shape[1]
        delta, hidden = torch.empty_like(gates), torch.empty_like(before)

        def step(rows: slice, states: list[Tensor]) -> Sequence[Tensor]:
            i, f, n, o = gates[rows].split(cells, 1)
            hidden[rows] = states[0] + grads[0][rows]
            wide = hidden[rows] @ narrow
            cell = states[1] + wide * o * (1 - squashed[rows] * squashed[rows])
            into = [cell * n * i * (1 - i), cell * old_cells[rows] * f * (1 - f)]
            into += [cell * i * (1 - n * n), wide * squashed[rows] * o * (1 - o)]
            torch.cat(into, 1, out=delta[rows])
            return delta[rows] @ weight, cell * f

        dh, dc = through(reversed(ctx.steps.visited()), grads[1:], step)
        o = gates[:, 3 * cells :]
        ctx.sinks[0](before, delta)
        ctx.sinks[1](o * squashed, hidden)
        return None, None, None, None, delta, dh, dc, None, None, None
