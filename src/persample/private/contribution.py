"""What one record contributes to a sum: its clipped gradient, by plain autograd."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..api import record
from .sums import Sums, wide
from .training import Training
from .users import Part

Named = Mapping[str, Tensor]


def alone(training: Training, unit: int, step: int) -> dict[str, Tensor]:
    """The clipped gradient of a unit by plain autograd.

    In a model at rest it runs alone; else in the micro-batch that it was drawn in, with the same
    random numbers.
    """
    parts = [p for p in training.parts(step) if unit in p.units.tolist()]
    if not parts:  # a user without samples
        return Sums(training.trainable()).total()
    (part,) = parts
    place = part.units.tolist().index(unit)
    ids = torch.arange(len(part.rows)) if part.ids is None else part.ids
    mine = ids == place
    if training.model.training:
        rows, n = part.rows, part.n
    else:
        rows, ids, mine, n, place = part.rows[mine], ids[mine] - place, mine[mine], 1, 0
    found = _gradient(training, part, rows, mine)
    if not length(found) < float("inf"):  # of another row, perhaps: 0 · NaN is NaN
        found = _gradient(training, part, torch.where(mine, rows, rows[mine][0]), mine)
    if place in _overflowing(training, part, rows, ids, n):
        return {name: torch.zeros_like(g, dtype=_double(g)) for name, g in found.items()}
    return clip(found, training.plan.max_norm, training.plan.clipping)


def _overflowing(training: Training, part: Part, rows: Tensor, ids: Tensor, n: int) -> list[int]:
    """Units that contribute nothing because something of their gradient is not finite."""
    assert training.loss_fn is not None
    training.observer.recording(part)
    with record(training.model, n=n, sample_ids=ids, **training.options) as tape:
        tape.backward(training.loss_fn(training.model, training.load(rows)))
    found: list[int] = tape.nonfinite().tolist()
    tape.close()
    return found


def _gradient(training: Training, part: Part, rows: Tensor, mine: Tensor) -> dict[str, Tensor]:
    """The gradient of some of the losses of a batch of rows."""
    assert training.loss_fn is not None
    training.observer.recording(part)
    losses = training.loss_fn(training.model, training.load(rows))
    named = training.trainable()
    for parameter in named.values():
        parameter.grad = None
    losses[mine.to(losses.device)].sum().backward()  # checkpointing may refuse autograd.grad
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        for name, p in named.items()
    }
    for parameter in named.values():
        parameter.grad = None
    return found


def clip(grads: Named, bound: float, clipping: str) -> dict[str, Tensor]:
    """One gradient, clipped by the plan's rule, in double precision; zero if it overflows."""
    squares = [g.abs().to(wide(g.abs().dtype)).square().sum() for g in grads.values()]
    exact = {name: g.to(_double(g)) for name, g in grads.items()}
    if not all(bool(torch.isfinite(s)) for s in [*squares, torch.stack(squares).sum()]):
        return {name: torch.zeros_like(g) for name, g in exact.items()}
    if clipping == "per_layer":
        share = bound / len(exact) ** 0.5
        return {name: g * _most(share, length({name: g})) for name, g in exact.items()}
    size = length(exact)
    c = bound / (size + 0.01) if clipping == "automatic" else _most(bound, size)
    return {name: g * c for name, g in exact.items()}


def _most(bound: float, size: float) -> float:
    return bound / size if size > bound else 1.0


def difference(with_it: Named, without: Named, expected: Named) -> float:
    """‖S(D) − S(D′) − clip(g)‖."""
    names = expected.keys()
    return length(
        {k: with_it[k].to(_double(expected[k])) - without[k] - expected[k] for k in names}
    )


def _double(value: Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64


def length(named: Named) -> float:
    """‖·‖ over all tensors."""
    squares = [float(v.abs().double().square().sum()) for v in named.values()]
    return float(sum(squares) ** 0.5)
