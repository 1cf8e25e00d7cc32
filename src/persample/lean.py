"""Lean recordings: nothing is kept; norms during one backward pass, sums during another.

The first backward turns every use into its squared norms and lets go of it; a parameter with
several uses waits for the last of them, because norms of uses do not add up. A weighted sum is a
second backward pass of the same losses, in which every use adds its weighted gradients. Weights are
applied to the uses, in float32 at least, not to the losses: half precision would round them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from .forms import Form, total


@dataclass(slots=True)
class Lean:
    """The state of a lean recording."""

    awaited: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, list[Form]] = field(default_factory=dict)
    sq_norms: dict[str, Tensor] = field(default_factory=dict)
    sq_bounds: dict[str, Tensor] = field(default_factory=dict)
    losses: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)
    sums: dict[str, Tensor] | None = None
    weights: Tensor | None = None
    bad: Tensor | None = None

    def expect(self, names: Iterable[str]) -> None:
        """A use of these parameters was recorded in forward."""
        for name in names:
            self.awaited[name] = self.awaited.get(name, 0) + 1

    def take(self, name: str, form: Form) -> None:
        """A use fired."""
        if self.sums is not None:
            self._add(name, form)
            return
        self.waiting.setdefault(name, []).append(form)
        if len(self.waiting[name]) == self.awaited.get(name, -1) and name not in self.sq_norms:
            self._settle(name)

    def _add(self, name: str, form: Form) -> None:
        assert self.sums is not None
        assert self.weights is not None
        if self.bad is not None:
            form = form.without(self.bad)
        value = form.certain_sum(self.weights)
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _settle(self, name: str) -> None:
        form = total(self.waiting.pop(name))
        self.sq_norms[name] = form.sq_norms()
        self.sq_bounds[name] = form.sq_bounds()

    def finish(self) -> None:
        """The backward pass is over: parameters whose other uses got no gradient are complete."""
        for name in list(self.waiting):
            self._settle(name)

    def clear(self) -> None:
        """Let go of everything."""
        self.waiting.clear()
        self.sq_norms.clear()
        self.sq_bounds.clear()
        self.losses.clear()
