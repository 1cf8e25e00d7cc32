"""Replay: one training on data with and without a record, with equal randomness.

Both runs hold the same parameters in every step, because the update that the first one releases is
forced on the others. So the sums of a step differ by what the removed record contributed, and that
must be its clipped gradient, computed alone: no more than C, and nothing else may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..validation import number, shown, whole
from .arms import Arm, expect_public, others
from .contribution import alone, difference, length
from .training import Training

Step = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Compared:
    """One step with and without one record; lengths in units of C.

    Attributes:
        remove: The record.
        step: The step, from 1.
        batch: How many records were in it.
        contribution: ‖clip(g)‖ of the removed record, computed alone.
        aligned: ‖S(D) − S(D′) − clip(g)‖, where the record's place holds another one with weight 0.
        dropped: The same where the record is really missing, with dropout off.
        limit: What rounding explains.
        problems: What else is wrong.
    """

    remove: int
    step: int
    batch: int
    contribution: float
    aligned: float | None
    dropped: float
    limit: float
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the sums differ by the record's clipped gradient, to rounding."""
        found = [self.dropped] if self.aligned is None else [self.aligned, self.dropped]
        close = all(error <= self.limit for error in found)  # False for NaN
        return close and self.contribution <= 1 + self.limit and not self.problems


@dataclass(frozen=True, slots=True)
class Report:
    """The result of :func:`replay`; true if every step held, and printed as a table."""

    compared: tuple[Compared, ...]
    max_norm: float
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether every step held."""
        return bool(self.compared) and all(each.ok for each in self.compared)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        worst = max((c.contribution for c in self.compared), default=0.0)
        lines = [
            f"replay: {'passed' if self.ok else 'FAILED'}, {len(self.compared)} comparisons, "
            f"largest contribution {worst:.6f} C (C = {self.max_norm:g})",
            "removed  step  batch  clipped g/C  aligned  dropped  limit",
        ]
        for c in self.compared:
            aligned = "-" if c.aligned is None else f"{c.aligned:.1e}"
            lines.append(
                f"{c.remove:7d}  {c.step:4d}  {c.batch:5d}  {c.contribution:11.6f}  {aligned:>7}  "
                f"{c.dropped:.1e}  {c.limit:.0e}{'' if c.ok else '  <- wrong'}"
            )
            lines += [f"         {problem}" for problem in c.problems]
        return "\n".join([*lines, *self.notes])


def replay(
    program: Callable[[Any], Any],
    data: Any,
    *,
    remove: int | Sequence[int],
    steps: int = 3,
    max_norm: float | None = None,
) -> Report:
    """Check that removing a record changes a private training by its clipped gradient alone.

    S(D) − S(D′) = clip(g, C) in every step, at equal parameters, draws and noise, and everything
    public is equal: draws of the others, noise (once, of the stated scale), divisor, updates.

    >>> import torch
    >>> from persample import private
    >>> def make_training(data):
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Linear(3, 1)
    ...     plan = private.plan(noise_multiplier=1.0, delta=1e-3, size=20, batch_size=5, steps=3)
    ...     return private.Training(
    ...         model,
    ...         torch.optim.SGD(model.parameters(), lr=0.1),
    ...         data,
    ...         plan,
    ...         loss_fn=lambda model, x: model(x).square().sum(1),
    ...     )
    >>> private.replay(make_training, torch.randn(20, 3), remove=17).ok
    True

    A loop of your own, or of another library, is checked by a function of indices that returns the
    sum of clipped gradients before noise (a tensor, or several), and does not update the model:

    >>> x = torch.randn(20, 3)
    >>> def step(indices):
    ...     g = x[indices]  # gradients of x·w
    ...     return (g / g.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0)
    >>> private.replay(step, x, remove=17, max_norm=1.0).ok
    True

    Args:
        program: ``make_training(data)`` returns a :class:`Training` with a ``loss_fn``; or, with
            ``max_norm``, ``step(indices)`` returns a sum before noise.
        data: What ``program`` takes; for ``step``, data of which the length is read, or a number.
        remove: The record (or user) to remove, or several of them, one after the other.
        steps: How many steps are compared.
        max_norm: C, for ``step``.
    """
    removed = [remove] if isinstance(remove, int) else list(remove)
    count = whole(steps, "steps", least=1)
    if not callable(program):
        raise UsageError(
            f"replay takes a function, got {shown(program)}",
            fix="replay(make_training, data, remove=17), make_training(data) -> Training",
        )
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        found: list[Compared] = []
        if max_norm is not None:
            bound = number(max_norm, "max_norm")
            size = data if isinstance(data, int) else len(data)
            for each in removed:
                found += _functions(program, size, _index(each, size), count, bound)
            return Report(tuple(found), bound)
        for each in removed:
            compared, bound = _trainings(program, data, each, count)
            found += compared
        return Report(tuple(found), bound if removed else 0.0)


def _trainings(
    make: Callable[[Any], Any], data: Any, remove: int, steps: int
) -> tuple[list[Compared], float]:
    first = _made(make, data)
    unit = _index(remove, first.units.size)
    arms = [
        Arm(first, unit),
        Arm(_made(make, others(first, data, unit)), unit, masked=True),
        Arm(_made(make, data), unit, still=True),
        Arm(_made(make, data), unit, still=True, present=False),
    ]
    for arm in arms[1:]:
        arm.follow(arms[0])
    found = []
    for step in range(min(steps, first.plan.steps)):
        for arm in arms:
            arm.run()
        sums = [arm.sums() for arm in arms]
        moving, resting = (alone(arm.training, unit, step) for arm in (arms[0], arms[2]))
        for arm in arms:
            arm.finish(arms[0])
        bound = first.plan.max_norm
        found.append(
            Compared(
                remove,
                step + 1,
                arms[0].drawn_now,
                max(length(moving), length(resting)) / bound,
                difference(sums[0], sums[1], moving) / bound,
                difference(sums[2], sums[3], resting) / bound,
                _limit(sums[0], arms[0].drawn_now, length(resting) / bound),
                tuple(expect_public(arms, step, sums)),
            )
        )
    return found, first.plan.max_norm


def _functions(step: Step, size: int, remove: int, steps: int, bound: float) -> list[Compared]:
    generator, found = torch.Generator().manual_seed(0), []
    for k in range(steps):
        within = torch.rand(size, generator=generator) < min(0.5, 16 / size)
        within[remove] = True
        both = within.nonzero().flatten()
        with_it, without, single = (
            _called(step, indices)
            for indices in (both, both[both != remove], torch.tensor([remove]))
        )
        error = difference(with_it, without, single) / bound
        mine = length(single) / bound
        limit = _limit(with_it, len(both), mine)
        found.append(Compared(remove, k + 1, len(both), mine, None, error, limit))
    return found


def _called(step: Step, indices: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = step(indices)
    if isinstance(made, Tensor):
        made = [made]
    listed = isinstance(made, (Mapping, list, tuple))
    named = made if isinstance(made, Mapping) else dict(enumerate(made if listed else ()))
    if not named or not all(isinstance(value, Tensor) for value in named.values()):
        raise UsageError(
            f"step(indices) must return the sum before noise, got {shown(made)}",
            fix="a tensor, a list of tensors, or a dictionary of them",
        )
    return {str(name): value.detach().clone() for name, value in named.items()}


def _limit(sums: Mapping[str, Tensor], batch: int, contribution: float) -> float:
    """What rounding explains, in units of C: of a sum over the batch, and of one gradient.

    In float32 a thousandth of C, which some other sample's gradient may move when the batch has
    another shape, and a thousandth of the contribution. A mean loss or a sum that is clipped
    instead of its samples is off by a tenth of C and more.
    """
    eps = max(torch.finfo(value.dtype).eps for value in sums.values())
    return float(eps * max(8192, 64 * (batch + 1) ** 0.5) + 1e-3 * contribution)


def _made(make: Callable[[Any], Any], data: Any) -> Training:
    made = make(data)
    if not isinstance(made, Training) or made.loss_fn is None:
        raise UsageError(
            f"make_training must return a Training with a loss_fn, got {shown(type(made))}",
            fix="private.Training(model, optimizer, data, plan, loss_fn=...); a function of indices"
            " needs max_norm=",
        )
    if made.processes.count > 1:
        raise UsageError("replay runs in one process", fix="call it before init_process_group")
    return made


def _index(remove: Any, size: int) -> int:
    found = whole(remove, "remove", least=0)
    if found >= size:
        raise UsageError(f"remove={found} of {size} records", fix=f"0 … {size - 1}")
    return found
