"""Record an RNN, GRU or LSTM layer by layer: input projections and recurrences as linear uses.

torch's own kernels hide the gate gradients, so that per-sample weight gradients would cost one
backward pass per sample. Where the layer can be unrolled exactly, it is; else the generic rule
serves the kernel as it is. Cells are split into the linear products and gates they are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import here
from ...layouts import Layout, closed, explicit, ids_of
from ...uses import ANCHOR, Context, Kind, Use, taken_apart, tapped
from ..roles import operand_of
from .recurrence import Recurrence, Steps

CELLS = frozenset(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"))


@dataclass(slots=True)
class Request:
    """The arguments of a recurrent call, in one form for padded and packed input."""

    kind: str
    x: Tensor
    sizes: list[int] | None
    hidden: tuple[Tensor, ...]
    weights: list[Tensor]
    biases: bool
    layers: int
    directions: int
    dropout: float
    batch_first: bool

    @property
    def per(self) -> int:
        """Weights of one layer and direction: input, hidden, two biases, a projection."""
        return len(self.weights) // (self.layers * self.directions)


def request(kind: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Request | None:
    """Parse a call; None if it has features that are left to torch's kernel."""
    if kwargs or len(args) != 9:
        return None
    packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()
    x, rest = args[0], args[2:] if packed else args[1:]
    hidden, weights, biases, layers, dropout, train, both = rest[:7]
    hidden = tuple(hidden) if isinstance(hidden, (tuple, list)) else (hidden,)
    directions, least = 2 if both else 1, 4 if biases else 2  # one more if states are projected
    if len(weights) not in (layers * directions * least, layers * directions * (least + 1)):
        return None
    if x.dim() != (2 if packed else 3) or x.device.type != "cpu" or x.numel() == 0:
        return None
    if torch.is_autocast_enabled(x.device.type):
        return None
    return Request(
        kind,
        x,
        args[1].tolist() if packed else None,
        hidden,
        list(weights),
        biases,
        layers,
        directions,
        dropout=float(dropout) if train else 0.0,
        batch_first=not packed and bool(rest[7]),
    )


def unroll(context: Context, asked: Request) -> Any:
    """The layer's result, recorded; None if its samples cannot be followed this way."""
    layout = context.look(asked.x)
    if not isinstance(layout, Layout) or layout.coupled is not None:
        return None
    slots = _slots(asked, layout, context.n or 0)
    if slots is None or not all(_fits(context, h, slots) for h in asked.hidden):
        return None
    with context.mode:
        return _run(context, asked, slots)


def _slots(asked: Request, layout: Layout, n: int) -> Layout | None:
    """The layout of (slots, …): one row per sequence."""
    x = asked.x
    if asked.sizes is None:
        axis = 0 if asked.batch_first else 1
        return closed(0, layout.inner) if layout.ids is None and layout.axis == axis else None
    rows = ids_of(layout, x.shape, n, x.device)
    if rows.shape[1:].numel() != 1:
        return None
    flat = rows.expand(x.shape[0], 1).flatten()
    first = flat[: asked.sizes[0]]
    index = torch.cat([torch.arange(size) for size in asked.sizes])
    if bool((first[index] != flat).any()) or bool((flat < 0).any()):
        return None
    return explicit(first.view(-1, 1), n)


def _fits(context: Context, state: Tensor, slots: Layout) -> bool:
    """A hidden state (layers, slots, features) without samples, or with them in the same slots."""
    known = context.look(state)
    if known is None:
        return True
    if not isinstance(known, Layout) or known.coupled is not None:
        return False
    n = context.n or 0
    mine = ids_of(known, state.shape, n, state.device)
    if mine.shape[0] != 1 or mine.shape[2] != 1:
        return False
    theirs = ids_of(slots, (state.shape[1], 1), n, state.device)
    return bool((mine.flatten() == theirs.flatten()).all())


def _run(context: Context, asked: Request, slots: Layout) -> Any:
    x = asked.x
    if asked.sizes is None:
        steps = x.transpose(0, 1) if asked.batch_first else x
        sizes = [steps.shape[1]] * steps.shape[0]
        rows = steps.reshape(-1, x.shape[-1])
    else:
        sizes, rows = asked.sizes, x
    last: list[list[Tensor]] = [[] for _ in asked.hidden]
    for layer in range(asked.layers):
        if layer and asked.dropout:  # rows as torch lays them out, so the same numbers are drawn
            rows = F.dropout(rows, asked.dropout, True)
        outs = []
        for direction in range(asked.directions):
            index = layer * asked.directions + direction
            weights = asked.weights[index * asked.per : (index + 1) * asked.per]
            states = [h[index] for h in asked.hidden]
            out, *ends = _direction(
                context, asked, rows, Steps(sizes, direction == 1), states, weights, slots
            )
            outs.append(out)
            for store, end in zip(last, ends, strict=True):
                store.append(end)
        rows = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    out = rows
    if asked.sizes is None:
        out = rows.reshape(len(sizes), sizes[0], -1)
        out = out.transpose(0, 1) if asked.batch_first else out
    return (out, *(torch.stack(store) for store in last))


def _direction(
    context: Context, asked: Request, rows: Tensor, steps: Steps, states: list[Tensor],
    weights: list[Tensor], slots: Layout,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One layer in one direction; marks its results."""
    into, hidden = weights[0], weights[1]
    into_bias, hidden_bias = (weights[2], weights[3]) if asked.biases else (None, None)
    u = F.linear(rows, into, into_bias)
    with torch._C.DisableTorchFunction():
        layout = context.look(u)
        assert isinstance(layout, Layout)
        narrow = weights[-1] if asked.per % 2 else None
        uses = [_use(context, hidden, hidden_bias, layout)]
        if narrow is not None:
            uses.append(_use(context, narrow, None, layout))
        cell = states[1] if asked.kind == "lstm" else None
        bias = None if hidden_bias is None else hidden_bias.detach()
        found = Recurrence.apply(
            ANCHOR, asked.kind, steps, uses, u, states[0], cell, hidden.detach(), bias,
            None if narrow is None else narrow.detach(),
        )  # fmt: skip
        context.states.put(found[0], layout)
        for end in found[1:]:
            context.states.put(end, slots)
    return tuple(found)


def _use(context: Context, weight: Tensor, bias: Tensor | None, layout: Layout) -> Use | None:
    """A product inside the time loop as a use of ``linear``."""
    leaves, template = taken_apart((None, weight, bias), {})
    operands = [operand_of(context, k, v) for k, v in enumerate(leaves) if v is not None]
    if not any(operand.wanted for operand in operands):
        return None
    kind = Kind("linear", template, [operand.position for operand in operands], [0], [layout])
    kept, batches = kind.constants(leaves), context.states.batches
    use = Use(context.ref, kind, F.linear, kept, operands, here(), batches)
    use.tapped = tapped([(0, layout, None, weight.detach().new_empty(0, weight.shape[0]))])
    context.receiver.expect(use)
    return use


def cell(context: Context, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The cell's result, each operator recorded; None if the call has an unusual form."""
    if kwargs or len(args) not in (4, 6) or not isinstance(args[0], Tensor) or args[0].dim() != 2:
        return None
    x, states = args[0], args[1]
    into, back = args[2:4]
    biases = args[4:] if len(args) == 6 else (None, None)
    states = [states] if isinstance(states, Tensor) else list(states)
    states = [_with_samples(context, state, x) for state in states]
    with context.mode:
        gates = F.linear(x, into, biases[0])
        return _RUN[name](gates, F.linear(states[0], back, biases[1]), *states)


def _with_samples(context: Context, state: Tensor, x: Tensor) -> Tensor:
    """A constant state may be given the input's samples: it influences nothing but its own row.

    Else its product with the weight would be one tensor derived from parameters for all samples.
    """
    layout = context.look(x)
    if not isinstance(layout, Layout) or layout.axes != (0,) or layout.coupled is not None:
        return state
    if state.requires_grad or state.shape[0] != x.shape[0] or context.look(state) is not None:
        return state
    with torch._C.DisableTorchFunction():
        alias = state.detach()
        context.states.put(alias, layout)
        return alias


def _lstm(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (u + v).chunk(4, 1)
    new = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * new.tanh(), new


def _gru(u: Tensor, v: Tensor, h: Tensor) -> Tensor:
    ur, uz, un = u.chunk(3, 1)
    vr, vz, vn = v.chunk(3, 1)
    new = (un + vn * (ur + vr).sigmoid()).tanh()
    return (h - new) * (uz + vz).sigmoid() + new


_RUN: dict[str, Any] = {
    "lstm_cell": _lstm,
    "gru_cell": _gru,
    "rnn_tanh_cell": lambda u, v, h: (u + v).tanh(),
    "rnn_relu_cell": lambda u, v, h: (u + v).relu(),
}
