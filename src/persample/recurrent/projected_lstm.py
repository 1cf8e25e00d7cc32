"""LSTM layers whose hidden state is projected to fewer features (``proj_size``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .recurrence import Sink, Steps, put


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
        h, c = h0.clone(), c0.clone()
        for first, last in steps.visited():
            size, g = last - first, gates[first:last]
            before[first:last], old_cells[first:last] = h[:size], c[:size]
            g.addmm_(h[:size], weight.t())
            i, f, n, o = g.split(cells, 1)
            for gate in (i, f, o):
                gate.sigmoid_()
            n.tanh_()
            c = put(c, size, f * c[:size] + i * n)
            squashed[first:last] = c[:size].tanh()
            outputs[first:last] = (o * squashed[first:last]) @ narrow.t()
            h = put(h, size, outputs[first:last])
        ctx.steps, ctx.sinks = steps, (sink, narrow_sink)
        ctx.save_for_backward(before, weight, narrow, gates, old_cells, squashed)
        ctx.set_materialize_grads(True)
        return outputs, h.clone(), c.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Through time; gradients of gates and of hidden states are handed to the sinks."""
        before, weight, narrow, gates, old_cells, squashed = ctx.saved_tensors
        cells = narrow.shape[1]
        delta, hidden = torch.empty_like(gates), torch.empty_like(before)
        dout, dh, dc = grads[0], grads[1].clone(), grads[2].clone()
        for first, last in reversed(ctx.steps.visited()):
            size, part = last - first, slice(first, last)
            i, f, n, o = gates[part].split(cells, 1)
            hidden[part] = dh[:size] + dout[part]
            wide = hidden[part] @ narrow
            cell = dc[:size] + wide * o * (1 - squashed[part] * squashed[part])
            delta[part] = torch.cat(
                [
                    cell * n * i * (1 - i),
                    cell * old_cells[part] * f * (1 - f),
                    cell * i * (1 - n * n),
                    wide * squashed[part] * o * (1 - o),
                ],
                1,
            )
            dh = put(dh, size, delta[part] @ weight)
            dc = put(dc, size, cell * f)
        o = gates[:, 3 * cells :]
        ctx.sinks[0](before, delta)
        ctx.sinks[1](o * squashed, hidden)
        return None, None, None, None, delta, dh, dc, None, None, None
