"""What backward brought: the forms of every use, grouped by parameter when asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .distributed import crosses
from .entries import (
    Entry,
    attached,
    changed,
    expect_unchanged,
    gone,
    held,
    nobodys,
    own,
    small,
    sources,
    table_behind,
    unowned,
    written_out,
)
from .errors import MixedSamplesError, PersampleError, Reason, StaleError, UsageError, describe
from .explain import Measure, measured
from .forms import Dense, Form, Outer, kept_rows, scratch, sharing, total, within
from .lean import Lean, Visitor
from .marks import version
from .rules import RULES, Forms, OfTable, Unsuited, generic
from .use import Firing, Operand, Use, comes_back

if TYPE_CHECKING:
    from .recorder import Recorder


class Ledger:
    """All entries of a tape, and whether they may be trusted."""

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
        self.coupled: Reason | None = None
        self.looped: dict[str, Tensor] | None = None
        self.lean: Lean | None = None if recorder.ahead is None else Lean(recorder.ahead)
        self.told: list[tuple[Use, Operand, str, Measure]] = []
        self._watched: dict[str, Operand] = {}
        self._cache: dict[str, Form] = {}
        self.returned: list[tuple[Use, Tensor]] = []

    def clear(self) -> None:
        """Let go of all factors."""
        self.entries.clear()
        self._cache.clear()
        self.looped = None
        if self.lean is not None:
            self.lean.clear()

    # ------------------------------------------------------------------ backward

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
        """A tap fired: turn saved data and output gradients into forms."""
        if not self.receiving:
            if self.trouble is None and not self.muted:
                self.trouble = UsageError(
                    "a backward pass that persample did not start reached the recorded model",
                    why="its root is unknown, so nothing proves whose loss was back-propagated",
                    fix="call tape.backward(losses)",
                )
            if self.strict and not self.muted:
                raise UsageError(
                    "a backward pass reached the recorded module past its outputs",
                    where=describe(use.place),
                    why="a tensor from inside it (kept by a hook or an attribute) is in the loss",
                    fix="return that tensor from forward()",
                )
            return
        for reason, grad in zip(use.refused, grads, strict=True):
            if reason is not None and grad is not None:
                self.trouble = self.trouble or reason.error("samples meet before the loss")
                return
        if torch.is_grad_enabled():
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._take(use, saved, grads)
        else:
            with torch._C.DisableTorchFunction():
                self._take(use, saved, grads)

    def _take(self, use: Use, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        same = None if use.fingerprint is None else comes_back(use.fingerprint, saved)
        if same is not None:
            self.returned.append((use, same))
        storages = self.recorder.inputs.storages
        scaled = tuple([None if g is None else self._unscaled(g) for g in grads])
        firing = Firing(tuple([own(t, storages) for t in saved]), scaled)
        for layout, grad in zip(use.out_layouts, scaled, strict=True):
            if layout.ids is not None and grad is not None and unowned(layout, grad):
                self.trouble = self.trouble or nobodys(use)
                return
        forms, name = self.forms_of(use, firing, self.recorder.n or 0)
        kept = firing if self.recorder.positions else None
        if self._cache:
            self._cache.clear()
        for operand, form in zip(use.operands, forms, strict=True):
            if form is None or not operand.wanted:
                continue
            if isinstance(form, OfTable):
                operand, form = table_behind(operand, self._selected), form.rows
            self._keep(Entry(use, operand, form, name, kept, []))

    def _keep(self, entry: Entry) -> None:
        """For later questions, or for those who ask now."""
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
            for parameter, part in self.attached(entry, set(self.names)):
                self.sink(parameter, part)
        elif self.lean is not None:
            self._ask(self.lean, entry)
        else:
            entry.form = small(entry.form)
            tensors = (*entry.form.tensors(), *held(entry.firing))
            entry.versions = [(t, version(t)) for t in tensors]
            self.entries.append(entry)

    def _ask(self, lean: Lean, entry: Entry) -> None:
        """A lean recording asks now and keeps nothing."""
        if entry.operand.name is not None:
            self._watched[entry.operand.name] = entry.operand
        if not self.backwards:
            seen = measured(entry.form, entry.form, kept=False)
            self.told.append((entry.use, entry.operand, entry.rule, seen))
        with within(self.recorder.budget):
            for parameter, part in self.attached(entry, set(self.names)):
                lean.take(parameter, part)

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

    def _unscaled(self, grad: Tensor) -> Tensor:
        if grad.requires_grad:
            grad = grad.detach()
        if self.factor == 1.0:
            return grad
        return grad.to(torch.promote_types(grad.dtype, torch.float32)) * self.factor

    def forms_of(self, use: Use, firing: Firing, n: int) -> tuple[Forms, str]:
        """One form per operand, and the rule that gave them."""
        rule = self.recorder.rules.get(use.operator) or RULES.get(use.operator)
        if rule is not None and not use.inplace and n:
            try:
                return rule(use, firing, n), rule.__name__
            except Unsuited:
                pass
        return generic(use, firing, n), "generic"

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

    # ------------------------------------------------------------------ questions

    def sq_norms(self, names: Iterable[str], *, bounds: bool = False) -> dict[str, Tensor]:
        """‖gᵢ‖² of every parameter that received a gradient, or certified bounds."""
        if self.lean is not None:
            self.ready()
            kept = self.lean.sq_bounds if bounds else self.lean.sq_norms
            return {name: kept[name] for name in names if name in kept}
        forms = self.forms(names)
        outer = [f for f in forms.values() if isinstance(f, Outer)]
        with sharing(factor for form in outer for factor in (form.left, form.right)):
            return {name: f.sq_bounds() if bounds else f.sq_norms() for name, f in forms.items()}

    def expect_losses(self, question: str) -> None:
        """Refuse questions that need one loss per sample."""
        self.ready()
        if self.scalar:
            raise UsageError(
                f"{question} needs one loss per sample",
                why="a mean, a sum or weighted losses were back-propagated: rows are not gᵢ",
                fix="tape.backward(losses) with a vector of losses",
            )
        if self.coupled is not None:
            raise MixedSamplesError(
                f"{question}: the losses are scaled by a number taken from the whole batch",
                where=self.coupled.where(),
                why="one sample changes the scale of all others, so no bound holds",
                fix="divide by a constant, or by something of each sample's own",
            )
        if self.looped is not None:
            raise MixedSamplesError(
                f"{question}: this tape was computed one loss at a time, unproven",
                why="samples may influence each other's losses, so a bound would mean nothing",
                fix="use a model that persample can prove",
            )

    def expect_forms(self) -> None:
        """Refuse questions that look at a gradient more than once, where nothing is kept."""
        self.ready()
        if self.lean is not None:
            raise UsageError(
                "a lean recording keeps no gradients",
                why="cross() and positions() need both factors of every use at once",
                fix="record(model) without lean=True",
            )

    def forms(self, names: Iterable[str]) -> dict[str, Form]:
        """One form per parameter that received a gradient."""
        self.expect_forms()
        wanted = list(names)
        if self.looped is not None:
            return {name: Dense(self.looped[name]) for name in wanted}
        missing = {name for name in wanted if name not in self._cache}
        if missing:
            parts: dict[str, list[Form]] = {name: [] for name in missing}
            for entry in self.entries:
                for name, form in self.attached(entry, missing):
                    parts[name].append(form)
            for name, found in parts.items():
                if found:
                    self._cache[name] = total(found)
        return {name: self._cache[name] for name in wanted if name in self._cache}

    @contextlib.contextmanager
    def settled(self, names: Iterable[str]) -> Iterator[None]:
        """For norms and a sum: within the block, rows stand for forms where that is cheaper."""
        if self.lean is not None:
            yield
            return
        forms = self.forms(names)
        rows = kept_rows(forms)
        used = sum(form.nbytes() for form in rows.values())
        self._cache.update(rows)
        try:
            with within(scratch() - used):
                yield
        finally:
            self._cache.update({name: forms[name] for name in rows})

    def attached(self, entry: Entry, names: set[str]) -> list[tuple[str, Form]]:
        """The entry's form as a form of the parameters behind its operand."""
        return attached(entry, names, self._selected)

    def sources(self, operand: Operand) -> list[str]:
        """The parameters that a derived tensor was computed from."""
        return sources(operand, self._selected)

    def ready(self) -> None:
        """Refuse to answer from a recording that is not complete, or no longer true."""
        if self.trouble is not None:
            raise self.trouble
        if not self.backwards:
            raise UsageError(
                "no backward pass was recorded",
                fix="call tape.backward(losses) with one loss per sample",
            )
        for operand in self._watched.values():
            expect_unchanged(operand)
        for entry in self.entries:
            expect_unchanged(entry.operand)
            if any(version(t) != seen for t, seen in entry.versions):
                raise StaleError(
                    f"data recorded for {entry.use.operator} were overwritten in place",
                    where=describe(entry.use.place),
                    fix="ask the tape before activations, gradients or input buffers are reused",
                )
