"""Sums over samples beside samples' own elements, in one tensor.

The adjoint of a differential equation flattens the state, its gradient and the gradients of all
parameters to one vector, and takes it apart again. Elements that are sums have the colour n, which
is no sample's, and the layout is coupled by :class:`Sums`: it is followed through linear operators
alone. What picks elements of one kind is of that kind again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import Reason
from .call import Result
from .layout import Additive, Layout, State, explicit

JOINS = frozenset(("cat", "concat", "concatenate", "setitem"))


@dataclass(frozen=True, slots=True, eq=False)
class Sums(Reason):
    """Some elements are sums over samples."""


def beside_samples(
    live: list[tuple[Tensor, State]], why: Reason, n: int
) -> list[tuple[Tensor, State]] | None:
    """The arguments of a join, sums as layouts; None where values depend on the whole batch."""
    sums = Sums(why.operator, why.why, why.shapes, why.place, why.fix, why.real)
    found: list[tuple[Tensor, State]] = []
    for tensor, state in live:
        if isinstance(state, Additive) and state.coupled is None:
            ids = torch.full((1,) * tensor.dim(), n, device=tensor.device)
            found.append((tensor, Layout(0, 1, ids, sums)))
        elif isinstance(state, Layout) and isinstance(state.coupled, Sums | None):
            found.append((tensor, state))
        else:
            return None
    return found


def taken_apart(state: Result, why: Sums, n: int) -> Result:
    """Sums alone are a sum, samples alone are samples; both together keep the reason."""
    if not isinstance(state, Layout):
        return state
    sums = None if state.ids is None else state.ids == n
    if sums is None or not bool(sums.any()):
        return state if state.ids is None else explicit(state.ids, n)
    return Additive() if bool(sums.all()) else state.with_coupling(why)
