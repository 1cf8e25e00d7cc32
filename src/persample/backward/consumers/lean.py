"""Lean recordings: nothing is kept; each parameter is asked as soon as its uses are complete.

The first backward turns every parameter into its squared norms, and into what was asked ahead, and
lets go of it. A parameter with several uses waits for the last of them: neither norms nor squares
of uses add up. Every other question is one more backward pass of the same losses, in which each
parameter is shown to the question's visitor. Weights are applied to the uses, in float32 at least,
not to the losses: half precision would round them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...errors import MissedUseError
from ...forms import (
    LEAN,
    WALK,
    Dense,
    Form,
    Joint,
    Norms,
    Picked,
    Pullback,
    pull_back_together,
    real,
    scratch,
    settled,
    total,
    wide,
    within,
)
from ...forms.measure import Measure, measure_form
from ...forms.sums import project_parameter, variance_from_moments
from ...run_state import Autocast, current_autocast
from ...uses import Ahead, Operand, Use, Values, version
from ..contribution import Contribution
from .consumer import Consumer, Parts

Visitor = Callable[[str, Form], None]
# forms whose sum must be that of the rows that norms were taken of
_TOGETHER = (Joint, Picked, Pullback)
Told = tuple[Use, Operand, str, Measure]
Root = tuple[GradientEdge, torch.device, Tensor, float]  # of losses; their seed and its scale


class Along(NamedTuple):
    """A direction that the first pass took dots with."""

    direction: Tensor
    version: int
    values: Values

    def untouched(self) -> bool:
        """Whether it was not written to since."""
        return version(self.direction) == self.version and not self.values.changed()


@dataclass(slots=True)
class Lean(Consumer):
    """The state of a lean recording."""

    ahead: Ahead
    budget: int
    ordinary: bool = False  # whether sums over samples are wanted, for ``.grad``
    totals: dict[str, Tensor] = field(default_factory=dict)
    awaited: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, list[Form]] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    norms: dict[str, list[Norms]] = field(default_factory=dict)
    dots: dict[str, Tensor] = field(default_factory=dict)
    along: dict[str, Along] = field(default_factory=dict)
    projections: list[Tensor] = field(default_factory=list)
    squares: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    variances: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)  # whose rows were handed out
    operands: dict[str, Operand] = field(default_factory=dict)  # of parameters themselves
    told: list[Told] = field(default_factory=list)  # what explain() shows of every use
    root: Root | None = None
    hooks: dict[int, int] = field(default_factory=dict)  # on tensors, after the first pass
    autocast: Autocast = ()  # what the first pass ran under, and others must
    visitor: Visitor | None = None
    linear: bool = False
    patient: bool = False
    retain: bool = False
    done: bool = False

    def expect(self, names: Iterable[str]) -> None:
        """A use of these parameters was recorded in forward."""
        for name in names:
            self.awaited[name] = self.awaited.get(name, 0) + 1

    def show(self, visitor: Visitor | None, *, linear: bool = False, patient: bool = False) -> None:
        """Whom the next pass shows gradients to; ``linear`` visitors take every use as it comes.

        ``patient``: uses that forward did not announce may come (reentrant checkpointing), so every
        parameter waits for the end.
        """
        self.visitor, self.linear, self.patient = visitor, linear, patient

    def begin(self) -> None:
        """A backward pass begins."""
        if not self.done:  # an interrupted first pass leaves no half of itself
            self.clear()
        self.waiting.clear()
        self.settled.clear()
        self.seen.clear()

    def take(self, contribution: Contribution, parts: Parts) -> None:
        """A use fired: ask now and keep nothing."""
        operand = contribution.operand
        if operand.name is not None:
            self.operands[operand.name] = operand
        if not self.done:
            measure = measure_form(contribution.form, contribution.form, kept=False)
            self.told.append((contribution.use, operand, contribution.rule, measure))
        with within(self.budget):
            self._take(parts(contribution))

    def _take(self, parts: Sequence[tuple[str, Form]]) -> None:
        complete = []
        for name, form in parts:
            self.seen[name] = self.seen.get(name, 0) + 1
            if self.linear and self.visitor is not None and not isinstance(form, _TOGETHER):
                self.visitor(name, form)
            elif name not in self.settled:
                self.waiting.setdefault(name, []).append(form)
            else:
                raise MissedUseError(
                    f"a use of {name!r} came back after all that were recorded",
                    why="a recomputation in backward used it where forward did not",
                    fix="record without lean",
                )
            if self.seen[name] == self.awaited.get(name, -1) and not self.patient:
                complete.append(name)
        self._settle(complete)

    def _settle(self, names: Iterable[str]) -> None:
        """Ask parameters that are complete; those behind one derived tensor are walked to once."""
        forms = {name: total(self.waiting.pop(name)) for name in names if name in self.waiting}
        if not forms:
            return
        self.settled.update(forms)
        with within(WALK if scratch() == LEAN else scratch()):
            forms |= pull_back_together(forms)
        for name, form in forms.items():
            (self.visitor or self._first)(name, form)

    def _first(self, name: str, form: Form) -> None:
        if self.ordinary:
            self.totals[name] = form.sum_of_samples()
        if self.ahead.grads:
            form = self._written(name, form)
        else:
            self.norms[name] = settled(form)
        if self.ahead.direction is not None:
            direction = self.ahead.direction[name]
            self.dots[name] = form.dot(direction.detach())
            self.along[name] = Along(direction, version(direction), Values([direction]))
        if self.ahead.projection is not None:
            found = project_parameter(name, form, *self.ahead.projection)
            self.projections[:] = [p + found for p in self.projections] or [found]
        if self.ahead.moments:
            first, second = form.moments()
            self.sums[name] = first.to(wide(form.dtype))
            self.squares[name] = second.to(real(form.dtype))
            if form.n > 1:
                self.variances[name] = variance_from_moments((first, second), form.n).to(
                    real(form.dtype)
                )

    def _written(self, name: str, form: Form) -> Form:
        """Keep the rows; unless sums follow, they answer everything else, too, where cheaper."""
        rows = self.rows[name] = form.fresh()
        found = Dense(rows)
        narrow = rows.dtype != wide(rows.dtype)
        if self.ahead.again or narrow or form.plan().cost < found.plan().cost:
            self.norms[name] = settled(form)
            return form
        # a sum, should one follow, rounds in another order than the rows
        self.norms[name] = [found.norms()._replace(sq_error=form.sq_error, rows=True).kept()]
        return found

    def knows(self, direction: Mapping[str, Tensor], names: Collection[str]) -> bool:
        """Whether the first pass took dots with this very direction, not written to since."""
        return self.ahead.direction is not None and all(
            direction[name] is seen.direction and seen.untouched()
            for name, seen in self.along.items()
            if name in names
        )

    def handed(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Rows that the first pass wrote out, given away."""
        for name in names:
            self.given.add(name)
            if name in self.rows:
                yield name, self.rows.pop(name)

    def finish(self) -> None:
        """The backward pass is over: parameters whose other uses got no gradient are complete."""
        with within(self.budget):
            self._settle(list(self.waiting))

    def rollback(self) -> None:
        """The pass failed: the next one begins anew."""
        if not self.done:
            self.told.clear()

    def finished(self, root: Root | None, hooks: dict[int, int], *, retain: bool) -> None:
        """The first backward pass is over; ``root`` is where others start, if there may be any."""
        self.root, self.hooks, self.retain, self.done = root, hooks, retain, True
        self.autocast = () if root is None else current_autocast(root[1])

    def clear(self) -> None:
        """Let go of everything."""
        self.root, self.done = None, False
        moments = (self.squares, self.sums, self.variances, self.totals)
        kept = (self.waiting, self.norms, self.dots, self.along, self.rows, *moments)
        for answers in (*kept, self.told, self.projections, self.given):
            answers.clear()
