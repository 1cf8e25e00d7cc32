"""All guards of one recording behind one door: what they hear, and when they refuse.

A guard changes no number: without guards, every correct program gives the same answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import here
from ..forms import Form
from ..run_state import comes_back
from ..uses import Context, Operand, Use, Values, version
from .constants import Constants, Zeros, expect_finite
from .determinism import PassComparison, expect_deterministic
from .extracted_numbers import ExtractedNumbers
from .messages import (
    kept_data_overwritten,
    not_finite_at_zeros,
    parameter_changed,
    remade,
    saved_data_changed,
    zeros_overwritten,
)


class Kept(Protocol):
    """What a tape keeps of one use, as far as guards look at it."""

    use: Use
    watched: Sequence[Tensor]

    @property
    def operand(self) -> Operand:
        """The parameter, or what is derived from some."""

    def relies(self, by_hand: Collection[Any]) -> bool:
        """Whether answers are computed from values of parameters on demand."""

    def overwritten(self) -> bool:
        """Whether what is kept was written to."""


class Guards:
    """Hears a closed set of events; refuses by ``context.backward.refuse`` or by raising."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._constants = Constants()
        self._zeros = Zeros()
        self._values: list[Values] = []  # of every backward pass
        self._returned: list[tuple[Use, Tensor]] = []  # whether what was saved came back
        self._differences: list[Tensor] = []  # between tensors and what was made again
        self._deterministic: set[Any] = set()  # nodes of the user's own that did the same twice
        self.numbers = ExtractedNumbers(context)
        self.comparison = PassComparison()

    def clear(self) -> None:
        """Forget every tensor."""
        for seen in (self._values, self._returned, self._differences):
            seen.clear()
        self._constants = Constants()
        self._zeros.clear()
        self._deterministic.clear()

    # ------------------------------------------------------------------ forward

    def constants_used(self, constants: Sequence[Tensor], *, derived: bool) -> None:
        """Constants interacted with samples or (``derived``) with parameters alone."""
        self._constants.note(constants, derived=derived)

    def separated_by_zeros(
        self, operator: str, constants: Iterable[Tensor], out: Tensor, *, masks: bool
    ) -> None:
        """Zeros of a constant, or a mask, were all that kept samples separate in a call."""
        self._zeros.note(constants, masks=masks)
        if out.grad_fn is not None:
            out.grad_fn.register_hook(expect_finite(self._context.ref, operator, here()))

    def made_again(self, difference: Tensor) -> None:
        """A tensor was made again: whether it came out another."""
        self._differences.append(difference)

    # ------------------------------------------------------------------ backward

    def pass_begins(self) -> None:
        """A backward pass that is listened to."""
        self.numbers.begin()
        self.comparison.begin()
        self.comparison.guarded = self._context.user_code.exposed

    def fired(self, use: Use, saved: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """A tap brought what was saved, and output gradients."""
        if use.fingerprint is not None:
            self._returned.append((use, comes_back(use.fingerprint, saved)))
        if self._context.options.lean:
            self.comparison.note(grads)
        if self._zeros and not all(g is None or bool(g.isfinite().all()) for g in grads):
            self._context.backward.refuse(not_finite_at_zeros(use.operator, use.place))

    def pass_ends(self) -> None:
        """The engine is done: compare what came back with what was saved, in one look."""
        returned, self._returned = self._returned, []
        found = [same.to(returned[0][1].device) for _, same in returned]
        for k, same in enumerate(torch.stack(found).tolist() if found else ()):
            if not same:
                self._context.backward.refuse(saved_data_changed(returned[k][0]))
        if self._zeros.changed():
            self._context.backward.refuse(zeros_overwritten())

    def pass_left(self) -> None:
        """The pass is over, also where it failed."""
        self._returned.clear()
        self.numbers.begin()

    def remember(self, kept: Sequence[Kept], *, again: bool) -> None:
        """What answers are computed from must not change any more; ``again``: by further passes."""
        context = self._context
        if context.processes is not None and context.processes.sharded:
            return
        watched: list[Tensor] = []
        if again or any(one.relies(context.user_code.by_hand) for one in kept):
            watched = [*context.parameters.tensors.values(), *context.caller.alive()]
            watched += self._constants.reachable(derived=not again)
        if self._constants and not again:
            watched += self._constants.within(t for one in kept for t in one.watched)
        if watched:
            self._values.append(Values(watched))

    def forget_values(self) -> None:
        """Nothing will be computed from them any more."""
        self._values.clear()

    # ------------------------------------------------------------------ answers

    def expect_true(self, kept: Sequence[Kept], operands: Iterable[Operand] = ()) -> None:
        """Refuse to answer from what is no longer true."""
        looked, self._differences = self._differences, []
        if looked and bool(torch.stack([d.to(looked[0].device) for d in looked]).any()):
            self._context.backward.refuse(remade())
        if self._context.backward.trouble is not None:
            raise self._context.backward.trouble
        for operand in operands:
            _expect_unchanged(operand)
        by_hand = self._context.user_code.by_hand
        for one in kept:
            if one.relies(by_hand):  # what is computed from kept factors alone stays true
                _expect_unchanged(one.operand)
            if one.overwritten():
                raise kept_data_overwritten(one.use)

    def expect_values(self, *, behind: bool) -> None:
        """Refuse an answer that would be computed from parameters that were stepped.

        ``behind``: gradients go back to parameters behind derived tensors. A lean recording also
        runs over its inputs again.
        """
        if self._values and behind:
            self._context.parameters.expect_no_hooks()  # they would see what passes there
        if any(values.changed() for values in self._values):
            inputs = ", an input, a result" if self._context.options.lean else ""
            raise parameter_changed(f"a parameter{inputs} or a constant")

    def expect_deterministic(self, node: Any, found: Sequence[tuple[str, Form]]) -> None:
        """Refuse code of the user's own, at a node, that does something else the second time."""
        if node not in self._deterministic:
            for name, form in found:
                expect_deterministic(name, form)
            self._deterministic.add(node)


def _expect_unchanged(operand: Operand) -> None:
    """Refuse an answer about a parameter that has been stepped since."""
    if operand.name is not None and version(operand.value) != operand.version:
        raise parameter_changed(f"the parameter {operand.name!r}")
