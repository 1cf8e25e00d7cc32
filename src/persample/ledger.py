"""What backward brought: the forms of every use, grouped by parameter when asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .distributed import crosses, freed
from .errors import (
    MissedUseError,
    MixedSamplesError,
    PersampleError,
    Reason,
    StaleError,
    UsageError,
    describe,
)
from .explain import Measure, measured
from .forms import Dense, Form, Outer, Part, Replay, sharing, total, wide, within
from .forms.pullback import Pullback
from .layout import Layout
from .lean import Lean, Visitor
from .marks import version
from .rules import RULES, Forms, OfTable, Unsuited, generic
from .rules.embedding import as_rows
from .use import Firing, Operand, Use, comes_back

if TYPE_CHECKING:
    from .recorder import Recorder


@dataclass(slots=True)
class Entry:
    """One use's contribution to one operand in one backward."""

    use: Use
    operand: Operand
    form: Form
    rule: str
    firing: Firing | None
    versions: list[tuple[Tensor, int]]


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
        firing = Firing(tuple([_own(t, storages) for t in saved]), scaled)
        use.fired += 1
        for layout, grad in zip(use.out_layouts, scaled, strict=True):
            if layout.ids is not None and grad is not None and unowned(layout, grad):
                self.trouble = self.trouble or _nobodys(use)
                return
        forms, name = self.forms_of(use, firing, self.recorder.n or 0)
        kept = firing if self.recorder.positions else None
        if self._cache:
            self._cache.clear()
        for operand, form in zip(use.operands, forms, strict=True):
            if form is None or not operand.wanted:
                continue
            if isinstance(form, OfTable):
                operand, form = self._table(operand), form.rows
            for entry in self._written_out(Entry(use, operand, form, name, kept, [])):
                self._keep(entry)

    def _keep(self, entry: Entry) -> None:
        """For later questions, or for those who ask now."""
        if self.sink is not None:
            for parameter, part in self.attached(entry, set(self.names)):
                self.sink(parameter, part)
        elif self.lean is not None:
            self._ask(self.lean, entry)
        else:
            entry.form = _small(entry.form)
            held = (*entry.form.tensors(), *_held(entry.firing))
            entry.versions = [(t, version(t)) for t in held]
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

    def _table(self, operand: Operand) -> Operand:
        """The table behind a look-up, as an operand of its own."""
        assert operand.lookup is not None
        name = operand.lookup.name
        value = self.recorder.parameters.selected[name].detach()
        return Operand(operand.position, value, name, None, version(value))

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
                    self.trouble = self.trouble or _changed(use)

    def _written_out(self, entry: Entry) -> list[Entry]:
        """Sharded parameters lose their memory after backward: compute what needs it at once."""
        spread = self.recorder.spread
        if spread is None or not spread.sharded:
            return [entry]
        selected = self.recorder.parameters.selected
        needed = self.sources(entry.operand)
        if any(freed(selected[name]) for name in needed):
            self.trouble = self.trouble or _gone(entry.use)
            return []
        if isinstance(entry.form, Replay):
            entry.form = Dense(entry.form.wide_dense())
        found = []
        for name, form in self.attached(entry, set(needed)):
            if isinstance(form, Pullback):
                form = Dense(form.wide_dense())
            value = selected[name].detach()
            operand = Operand(entry.operand.position, value, name, None, version(value))
            found.append(Entry(entry.use, operand, form, entry.rule, entry.firing, []))
        return found

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
    def names(self) -> list[str]:
        """The recorded parameters."""
        return list(self.recorder.parameters.selected)

    def expect(self, use: Use) -> None:
        """A use was recorded in forward."""
        spread = self.recorder.spread
        if spread is not None and spread.sharded:
            for operand in use.operands:
                if crosses(operand.edge):
                    raise _gone(use)
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

    def attached(self, entry: Entry, names: set[str]) -> list[tuple[str, Form]]:
        """The entry's form as a form of the parameters behind its operand."""
        operand, form = entry.operand, entry.form
        if operand.name is not None:
            return [(operand.name, form)] if operand.name in names else []
        lookup, view = operand.lookup, operand.view
        if lookup is not None and version(lookup.index) == lookup.version:
            if isinstance(form, Dense):
                return [(lookup.name, as_rows(form, lookup))] if lookup.name in names else []
        if view is not None and tuple(form.shape) == view.size:
            if view.name not in names:
                return []
            shape = self.recorder.parameters.selected[view.name].shape
            return [(view.name, Part(form, shape, view.strides, view.offset))]
        selected = self.recorder.parameters.selected
        return [
            (name, Pullback(form, operand.edge, selected[name], operand.value.dtype))
            for name in self.sources(operand)
            if name in names
        ]

    def sources(self, operand: Operand) -> list[str]:
        """The parameters that a derived tensor was computed from."""
        if operand.name is not None:
            return [operand.name]
        if operand.edge is None:
            return []
        if operand.lookup is not None:
            return [operand.lookup.name]
        if operand.sources is None:
            selected = self.recorder.parameters.selected
            with torch._C.DisableTorchFunction():
                found = torch.autograd.grad(
                    operand.edge, list(selected.values()), torch.zeros_like(operand.value),
                    retain_graph=True, allow_unused=True,
                )  # fmt: skip
            operand.sources = [n for n, f in zip(selected, found, strict=True) if f is not None]
        return operand.sources

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
            _expect_unchanged(operand)
        for entry in self.entries:
            _expect_unchanged(entry.operand)
            if any(version(t) != seen for t, seen in entry.versions):
                raise StaleError(
                    f"data recorded for {entry.use.operator} were overwritten in place",
                    where=describe(entry.use.place),
                    fix="ask the tape before activations, gradients or input buffers are reused",
                )


def _own(tensor: Tensor, storages: set[int]) -> Tensor:
    """A copy of what lies in the caller's own input buffers: they may be refilled unseen."""
    if tensor.untyped_storage().data_ptr() in storages:
        return tensor.detach().clone()
    return tensor.detach() if tensor.requires_grad else tensor


def _expect_unchanged(operand: Operand) -> None:
    if operand.name is not None and version(operand.value) != operand.version:
        raise StaleError(
            f"the parameter {operand.name!r} was modified after it was recorded",
            fix="ask the tape before optimizer.step()",
        )


def _held(firing: Firing | None) -> list[Tensor]:
    """What a kept firing holds."""
    if firing is None:
        return []
    return [*firing.saved, *(g for g in firing.grads if g is not None)]


def _small(form: Form) -> Form:
    """Keep rows instead of factors where they are smaller."""
    if form.__class__ is Dense or isinstance(form, (Dense, Replay)):
        return form
    if form.n * form.size * wide(form.dtype).itemsize <= form.nbytes():
        return Dense(form.wide_dense())
    return form


def unowned(layout: Layout, grad: Tensor) -> bool:
    """Whether rows of no sample received a gradient."""
    if layout.ids is None:
        return False
    nobody = layout.ids < 0
    return bool(nobody.any()) and bool((grad * nobody).ne(0).any())


def _changed(use: Use) -> MissedUseError:
    return MissedUseError(
        f"what {use.operator} saved in forward is not what came back in backward",
        where=describe(use.place),
        why="saved-tensor hooks, or a recomputation that the recorder could not follow",
        fix="use checkpoint(..., use_reentrant=False), or no hooks that change what they save",
    )


def _gone(use: Use) -> UsageError:
    return UsageError(
        f"{use.operator} used a tensor computed from parameters of another sharded module",
        where=describe(use.place),
        why="fully_shard has freed their memory when its gradient arrives",
        fix="compute it in the module that uses it, or shard both as one group",
    )


def _nobodys(use: Use) -> MissedUseError:
    return MissedUseError(
        f"a parameter used by {use.operator} reached the loss through rows of no sample",
        where=describe(use.place),
        why="constant rows share an axis with the samples' rows, and nothing says whose they are",
        fix="tape.mark(tensor, ids=...) says so; or join constants along another axis",
    )
