"""RNN, GRU and LSTM cells, split into the linear products and gates they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layouts.layout import Layout
from ...uses.context import Context

CELLS = frozenset(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"))


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
