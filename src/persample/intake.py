"""What backward brings: every tap's data and gradients become the forms of its use."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .conditions import comes_back, uncast
from .distributed import crosses
from .entries import (
    Entry,
    attached,
    forget_lookups,
    own,
    reached,
    sources,
    table_behind,
    written_out,
)
from .errors import PersampleError, Reason, UsageError, describe, unheard
from .explain import Measure, measured
from .forming import forms_of
from .forms import Form, Joint, within
from .lean import Lean, Visitor
from .nodes import leaves_of
from .refusals import changed, exchanged, gone, nobodys, opened, poisoned
from .rules import OfTable
from .steady import expect_steady
from .use import Firing, Operand, Use
from .values import Values

if TYPE_CHECKING:
    from .recorder import Recorder


class Intake:
    """Listens to the taps of one tape, keeps the entries, and notes what was wrong."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.entries: list[Entry] = []
        self._receiving = self._muted = False
        self.sink: Visitor | None = None  # takes every use's form; nothing is kept
        self.strict = False  # whether a backward pass from elsewhere raises at once
        self.factor = 1.0
        self.retain = True
        self.trouble: PersampleError | None = None
        self.backwards = 0
        self.scalar = False
        self.ordered = False  # the losses are in the samples' order
        self.coupled: Reason | None = None
        self.looped: dict[str, Tensor] | None = None
        self.reference: list[Tensor | None] = []  # autograd's gradients of weighted losses
        self.apart = True  # whether samples were proven apart, also where it was looped
        self.lean: Lean | None = None if recorder.ahead is None else Lean(recorder.ahead)
        self.told: list[tuple[Use, Operand, str, Measure]] = []
        self._watched: dict[str, Operand] = {}
        self._cache: dict[str, Form] = {}
        self._steady: set[Any] = set()  # where code of the user's own did the same twice
        self.returned: list[tuple[Use, Tensor]] = []
        self.values: list[Values] = []  # of every backward pass
        self.behind = False  # whether gradients go back to parameters behind derived tensors

    def clear(self) -> None:
        """Let go of all factors."""
        self.entries.clear()
        self._cache.clear()
        self._steady.clear()
        self.values.clear()
        self.looped = None
        if self.lean is not None:
            self.lean.clear()

    @property
    def receiving(self) -> bool:
        """Whether taps are listened to."""
        return self._receiving

    @receiving.setter
    def receiving(self, value: bool) -> None:
        self._receiving = value
        self.recorder.busy = value or self._muted

    @property
    def muted(self) -> bool:
        """Whether taps may fire without being listened to."""
        return self._muted

    @muted.setter
    def muted(self, value: bool) -> None:
        self._muted = value
        self.recorder.busy = value or self._receiving

    def rollback(self, mark: int) -> None:
        """Forget entries of an interrupted backward."""
        del self.entries[mark:]
        if not self.backwards:
            self.told.clear()
        self._cache.clear()

    def receive(
        self, use: Use, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> None:
        """A tap fired (torch functions are not watched): turn what it brought into forms."""
        if not self._receiving:
            self._stray(use)
            return
        if not use.tapped.usual:
            for reason, grad in zip(use.tapped.refused, grads, strict=True):
                if reason is not None and grad is not None:
                    self.trouble = self.trouble or reason.error("samples meet before the loss")
                    return
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            with torch.no_grad(), uncast():
                self._take(use, saved, grads)
        else:
            self._take(use, saved, grads)

    def _stray(self, use: Use) -> None:
        """A backward pass that nobody announced."""
        if self.trouble is None and not self._muted:
            if not self.strict:
                unheard()
            self.trouble = UsageError(
                "a backward pass that persample did not start reached the recorded model",
                why="its root is unknown, so nothing proves whose loss was back-propagated",
                fix="call tape.backward(losses)",
            )
        if self.strict and not self._muted:
            raise UsageError(
                "a backward pass reached the recorded module past its outputs",
                where=describe(use.place),
                why="a tensor from inside it (kept by a hook or an attribute) is in the loss",
                fix="return that tensor from forward()",
            )

    def _take(self, use: Use, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        if use.fingerprint is not None:
            same = comes_back(use.fingerprint, saved)
            if same is not None:
                self.returned.append((use, same))
        recorder = self.recorder
        scaled = tuple([None if g is None else self._unscaled(g) for g in grads])
        if self.lean is not None and self.lean.guarded:
            self.lean.leave(scaled)
        if self.lean is None and self.sink is None:  # those two ask at once
            storages = recorder.inputs.storages
            saved = tuple([own(t, storages) for t in saved])
        firing = Firing(saved, scaled)
        if not use.tapped.usual:
            for layout, grad in zip(use.out_layouts, scaled, strict=True):
                if layout.ids is not None and grad is not None:
                    guessed = None if self.ordered else use.guessed
                    if reached(layout.ids < 0, grad) or reached(guessed, grad):
                        self.trouble = self.trouble or nobodys(use)
                        return
        if recorder.by_zeros and not all(g is None or bool(g.isfinite().all()) for g in scaled):
            self.trouble = self.trouble or poisoned(use.operator, use.place)
            return
        if recorder.parameters.exchanged and self._exchanged(use):
            return
        if recorder.custom.by_hand:
            forget_lookups(use, recorder.custom.by_hand)
        forms, name = forms_of(
            use, firing, recorder.n or 0, recorder.rules, positions=recorder.positions
        )
        kept = firing if recorder.positions else None
        if self._cache:
            self._cache.clear()
        for operand, form in zip(use.operands, forms, strict=True):
            if form is None or (operand.name is None and operand.edge is None):
                continue
            self.behind = self.behind or operand.edge is not None
            if isinstance(form, OfTable):
                operand, form = table_behind(operand, self._selected), form.rows
            if self.sink is not None and operand.name is not None and recorder.spread is None:
                self.sink(operand.name, form)
                continue
            entry = Entry(use, operand, form, name, kept)
            if recorder.spread is None:
                self._hand(entry)
            else:
                self._spread(entry)

    def _exchanged(self, use: Use) -> bool:
        """Whether this use was of another tensor than the one that stands for its parameter."""
        for operand in use.operands:
            operand.sources = None  # another tensor may have been in the slot then
            ends: Sequence[Tensor | int] = [operand.owner]
            if operand.edge is not None:
                ends = leaves_of(operand.edge.node)
            for end in ends:
                name = self.recorder.parameters.stand(end)
                if name is not None:
                    self.trouble = self.trouble or exchanged(use.place, name)
                    return True
        return False

    def _spread(self, entry: Entry) -> None:
        """An entry of parameters that other processes may hold, too."""
        spread = self.recorder.spread
        if spread is not None and spread.sharded:
            found = written_out(entry, self._selected)
            if found is None:
                self.trouble = self.trouble or gone(entry.use)
            for each in found or []:
                self._hand(each)
        else:
            self._hand(entry)

    def _hand(self, entry: Entry) -> None:
        if self.sink is not None:
            for parameter, part in self.attached(entry, self._selected):
                self.sink(parameter, part)
        elif self.lean is not None:
            self._ask(self.lean, entry)
        else:
            entry.keep()
            self.entries.append(entry)

    def _ask(self, lean: Lean, entry: Entry) -> None:
        """A lean recording asks now and keeps nothing."""
        if entry.operand.name is not None:
            self._watched[entry.operand.name] = entry.operand
        if not self.backwards:
            seen = measured(entry.form, entry.form, kept=False)
            self.told.append((entry.use, entry.operand, entry.rule, seen))
        with within(self.recorder.budget):
            lean.take(self.attached(entry, self._selected))

    def expect_what_was_saved(self) -> None:
        """Compare what came back in backward with what was saved: one look for all uses."""
        returned, self.returned = self.returned, []
        by_device: dict[torch.device, list[tuple[Use, Tensor]]] = {}
        for use, same in returned:
            by_device.setdefault(same.device, []).append((use, same))
        for pairs in by_device.values():
            for (use, _), same in zip(
                pairs, torch.stack([same for _, same in pairs]).tolist(), strict=True
            ):
                if not same:
                    self.trouble = self.trouble or changed(use)
        if self.recorder.by_zeros.changed():
            self.trouble = self.trouble or opened()

    def _unscaled(self, grad: Tensor) -> Tensor:
        if grad.requires_grad:
            grad = grad.detach()
        if grad._is_zerotensor():  # no memory, and not to be written to
            grad = grad.clone()
        if self.factor == 1.0:
            # what goes on to a hook or a custom function may be written to there
            return grad.clone() if self.recorder.custom.exposed else grad
        return grad.to(torch.promote_types(grad.dtype, torch.float32)) * self.factor

    @property
    def _selected(self) -> Mapping[str, Tensor]:
        return self.recorder.parameters.selected

    @property
    def names(self) -> list[str]:
        """The recorded parameters."""
        return list(self.recorder.parameters.selected)

    def expect(self, use: Use) -> None:
        """A use was recorded in forward."""
        spread = self.recorder.spread
        if spread is not None and spread.sharded:
            for operand in use.operands:
                if crosses(operand.edge):
                    raise gone(use)
                self.sources(operand)  # while the memory of parameters is there
        if self.lean is not None and not self.recorder.busy:
            for operand in use.operands:
                self.lean.expect(self.sources(operand))

    def attached(self, entry: Entry, names: Container[str]) -> list[tuple[str, Form]]:
        """The entry's form as a form of the parameters behind its operand."""
        found = attached(entry, names, self._selected, self.recorder.custom.by_hand)
        if found and found[0][1].__class__ is Joint and entry.operand.edge.node not in self._steady:
            for name, form in found:
                expect_steady(name, form)
            self._steady.add(entry.operand.edge.node)
        return found

    def sources(self, operand: Operand) -> list[str]:
        """The parameters that a derived tensor was computed from."""
        return sources(operand, self._selected)
