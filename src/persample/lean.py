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

from .conditions import Autocast, current_autocast
from .errors import MissedUseError, VerificationError
from .forms import (
    LEAN,
    WALK,
    Dense,
    Form,
    Joint,
    Picked,
    Pullback,
    pulled,
    real,
    scratch,
    total,
    wide,
    within,
)
from .marks import version
from .queries import projected, spread
from .steady import alike, footprint
from .values import Values

Visitor = Callable[[str, Form], None]
# forms whose sum must be that of the rows that norms were taken of
_TOGETHER = (Joint, Picked, Pullback)
Root = tuple[GradientEdge, torch.device, Tensor, float]  # of losses; their seed and its scale


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@dataclass(frozen=True, slots=True)
class Ahead:
    """Questions that a lean recording answers during its first backward pass, besides the norms.

    What is not named here costs a backward pass of its own when asked; the answers are the same.

    >>> import torch, persample
    >>> model = torch.nn.Linear(3, 2)
    >>> with persample.record(model, lean=persample.Ahead(projection=(16, 0))) as tape:
    ...     tape.backward(model(torch.randn(4, 3)).square().sum(1))
    >>> tape.project(16, seed=0).shape
    torch.Size([4, 16])

    Attributes:
        direction: For :meth:`Tape.dots`.
        projection: (dim, seed) for :meth:`Tape.project`.
        moments: For :meth:`Tape.second_moment` and :meth:`Tape.variance`.
        grads: For :meth:`Tape.grads`, which hands the rows out without keeping them.
        again: False promises that no further pass follows: the graph is freed while the first one
            passes, as any backward does.
    """

    direction: Mapping[str, Tensor] | None = None
    projection: tuple[int, int] | None = None
    moments: bool = False
    grads: bool = False
    again: bool = True


class Along(NamedTuple):
    """A direction that the first pass took dots with."""

    direction: Tensor
    version: int
    values: Values

    def untouched(self) -> bool:
        """Whether nobody wrote to it since."""
        return version(self.direction) == self.version and not self.values.changed()


@dataclass(slots=True)
class Lean:
    """The state of a lean recording."""

    ahead: Ahead
    awaited: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, list[Form]] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    sq_norms: dict[str, Tensor] = field(default_factory=dict)
    sq_bounds: dict[str, Tensor] = field(default_factory=dict)
    dots: dict[str, Tensor] = field(default_factory=dict)
    along: dict[str, Along] = field(default_factory=dict)
    projections: list[Tensor] = field(default_factory=list)
    squares: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    variances: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)  # whose rows were handed out
    root: Root | None = None
    hooks: dict[int, int] = field(default_factory=dict)  # on tensors, after the first pass
    autocast: Autocast = ()  # what the first pass ran under, and others must
    visitor: Visitor | None = None
    linear: bool = False
    patient: bool = False
    retain: bool = False
    done: bool = False
    restless: bool = False  # whether random numbers were drawn in it
    narrow: torch.dtype = torch.float64
    guarded: bool = False  # whether code of the user's own runs in it
    passed: list[Tensor] = field(default_factory=list)  # what output gradients were then
    before: list[Tensor] = field(default_factory=list)  # the same of the first pass

    def expect(self, names: Iterable[str]) -> None:
        """A use of these parameters was recorded in forward."""
        for name in names:
            self.awaited[name] = self.awaited.get(name, 0) + 1

    def begin(
        self, visitor: Visitor | None = None, *, linear: bool = False, patient: bool = False
    ) -> None:
        """A backward pass starts; ``linear`` questions take every use as it comes.

        ``patient``: uses that forward did not announce may come (reentrant checkpointing), so every
        parameter waits for the end.
        """
        if not self.done:  # an interrupted first pass leaves no half of itself
            self.clear()
        self.waiting.clear()
        self.settled.clear()
        self.seen.clear()
        self.passed = []
        self.visitor, self.linear, self.patient = visitor, linear, patient

    def take(self, parts: Sequence[tuple[str, Form]]) -> None:
        """A use fired: the forms of the parameters behind its operand."""
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
            forms |= pulled(forms)
        for name, form in forms.items():
            (self.visitor or self._first)(name, form)

    def _first(self, name: str, form: Form) -> None:
        if self.ahead.grads:
            form = self._written(name, form)
        else:
            self.sq_norms[name], self.sq_bounds[name] = form.measured()
        if self.ahead.direction is not None:
            direction = self.ahead.direction[name]
            self.dots[name] = form.dot(direction.detach())
            self.along[name] = Along(direction, version(direction), Values([direction]))
        if self.ahead.projection is not None:
            found = projected(name, form, *self.ahead.projection)
            self.projections[:] = [p + found for p in self.projections] or [found]
        if self.ahead.moments:
            first, second = form.moments()
            self.sums[name] = first.to(wide(form.dtype))
            self.squares[name] = second.to(real(form.dtype))
            if form.n > 1:
                self.variances[name] = spread((first, second), form.n).to(real(form.dtype))

    def _written(self, name: str, form: Form) -> Form:
        """Keep the rows; unless sums follow, they answer everything else, too, where cheaper."""
        rows = self.rows[name] = form.fresh()
        found = Dense(rows)
        narrow = rows.dtype != wide(rows.dtype)
        if self.ahead.again or narrow or form.plan().cost < found.plan().cost:
            self.sq_norms[name], self.sq_bounds[name] = form.measured()
            return form
        size = self.sq_norms[name] = found.sq_norms()
        # a sum, should one follow, rounds in another order than the rows
        self.sq_bounds[name] = (found.enlarged(size).sqrt() + 2 * form.rounding()).square_()
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
        self._settle(list(self.waiting))
        if not self.done:
            self.before = self.passed
        elif self.restless or not alike(self.before, self.passed, self.narrow):
            raise VerificationError(
                "this backward pass was another one than the first",
                why="a hook, a custom function or a recomputation draws random numbers in it, or "
                "keeps a state: norms of one pass say nothing of another's gradients",
                fix="record without lean, or name the question in persample.Ahead(...)",
            )

    def leave(self, grads: Iterable[Tensor | None]) -> None:
        """Output gradients passed, and code of the user's own may have made them."""
        found = [grad for grad in grads if grad is not None]
        if found:
            self.passed.append(footprint(found))
            self.narrow = max(self.narrow, *(g.dtype for g in found), key=_coarseness)

    def finished(self, root: Root | None, hooks: dict[int, int], *, retain: bool) -> None:
        """The first backward pass is over; ``root`` is where others start, if there may be any."""
        self.root, self.hooks, self.retain, self.done = root, hooks, retain, True
        self.autocast = () if root is None else current_autocast(root[1])

    def clear(self) -> None:
        """Let go of everything."""
        self.root, self.visitor, self.done = None, None, False
        self.projections.clear()
        self.given.clear()
        for kept in (self.waiting, self.sq_norms, self.sq_bounds, self.dots, self.along, self.rows):
            kept.clear()
        for moment in (self.squares, self.sums, self.variances):
            moment.clear()
