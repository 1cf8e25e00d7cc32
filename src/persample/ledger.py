"""Every parameter's form, once it is asked for, and whether it may be trusted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from .entries import expect_unchanged
from .errors import MixedSamplesError, StaleError, UsageError, describe
from .forms import (
    Apart,
    Dense,
    Form,
    Outer,
    Replay,
    Unsure,
    doubts,
    guarded,
    kept_rows,
    pulled,
    restored,
    scratch,
    sharing,
    together,
    total,
    within,
)
from .intake import Intake
from .refusals import remade, stepped
from .values import Values

Forms = Mapping[str, Form]
_LATE = (Apart, Replay)  # forms that may run an operator again


class Ledger(Intake):
    """The entries of a tape, grouped by parameter."""

    def sq_norms(self, names: Iterable[str], *, apart: bool = False) -> dict[str, Tensor]:
        """‖gᵢ‖², to be added up; ``apart``: of every parameter that received a gradient."""
        if self.lean is not None:
            self.ready()
            kept = self.lean.sq_norms
            return {name: kept[name] for name in names if name in kept}
        forms: Forms = self.written(names)
        forms = forms if apart else together(forms)
        with _sharing(forms):
            found = {name: form.estimated() for name, form in forms.items()}
        unsure = [name for name, (norms, scale) in found.items() if scale is not norms]
        if unsure:
            for name, doubt in zip(unsure, doubts([found[n] for n in unsure]), strict=True):
                if doubt:
                    restored(*found[name], forms[name].exactly)
        return {name: norms for name, (norms, _) in found.items()}

    def sq_bounds(self, names: Iterable[str], forms: Forms | None) -> dict[str, Tensor]:
        """Certified bounds of ‖gᵢ‖² for :meth:`settled` forms."""
        if forms is not None:
            with _sharing(forms):
                return _bounds(forms)
        assert self.lean is not None
        kept = self.lean.sq_bounds
        return {name: kept[name] for name in names if name in kept}

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
        if self.looped is not None and not self.apart:
            raise MixedSamplesError(
                f"{question}: this tape was computed one loss at a time, unproven",
                why="samples may influence each other's losses, so a bound would mean nothing",
                fix="use a model that persample can prove",
            )

    def expect_forms(self) -> None:
        """Refuse questions to forms where nothing is kept, or where they hold no more."""
        self.ready()
        if self.lean is not None:
            raise UsageError(
                "a lean recording keeps no gradients",
                why="cross() and positions() need both factors of every use at once",
                fix="record(model) without lean=True",
            )
        self.expect_values()

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

    def written(self, names: Iterable[str]) -> dict[str, Form]:
        """Forms whose rows will be looked at: what lies behind derived tensors is written out."""
        forms = self.forms(names)
        if self.looped is None:
            found = pulled(forms)
            self._cache.update(found)
            forms |= found
        return forms

    @contextlib.contextmanager
    def settled(self, names: Iterable[str], *, apart: bool) -> Iterator[Forms | None]:
        """Forms for norms and one sum, rows where that is cheaper; None where nothing is kept."""
        if self.lean is not None:
            yield None
            return
        forms = self.written(names)
        rows = kept_rows(forms)
        used = sum(form.nbytes() for form in rows.values())
        forms |= rows
        with within(scratch() - used):
            yield forms if apart else together(forms)

    def remember_values(self, mark: int) -> None:
        """A backward pass is over: what answers are computed from must not change any more.

        ``mark``: how many entries there were before it.
        """
        recorder, spread = self.recorder, self.recorder.spread
        if spread is not None and spread.sharded:
            return
        by_hand, constants, entries = recorder.custom.by_hand, recorder.constants, self.entries
        entries = entries[mark:] if mark else entries
        again = self.lean is not None and self.lean.root is not None
        late = [e for e in entries if e.operand.edge or e.firing or e.form.__class__ in _LATE]
        watched: list[Tensor] = []
        if again or any(entry.relies(by_hand) for entry in late):
            slots = recorder.parameters.slots.values()
            watched = [*(s.tensor for s in slots), *recorder.inputs.callers_now()]
            watched += constants.alive(derived=not again)
        if constants and not again:
            watched += constants.within(t for entry in entries for t in entry.watched)
        if watched:
            self.values.append(Values(watched))

    def expect_values(self) -> None:
        """Refuse an answer that would be computed from parameters that were stepped.

        A lean recording also runs over its inputs again.
        """
        if self.values and self.behind:
            self.recorder.parameters.expect_no_hooks()  # they would see what passes there
        if any(values.changed() for values in self.values):
            inputs = "" if self.lean is None else ", an input, a result"
            raise stepped(f"a parameter{inputs} or a constant")

    def ready(self) -> None:
        """Refuse to answer from a recording that is not complete, or no longer true."""
        if self.recorder.calls.repeats.changed():
            self.trouble = self.trouble or remade()
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
            if entry.overwritten():
                raise StaleError(
                    f"data recorded for {entry.use.operator} were overwritten in place",
                    where=describe(entry.use.place),
                    fix="ask the tape before activations, gradients or input buffers are reused",
                )


def _bounds(forms: Forms) -> dict[str, Tensor]:
    """Every form's bounds; products of positions of all parameters are looked at together."""
    found: dict[str, Tensor] = {}
    unsure: dict[tuple[torch.dtype, torch.device], dict[str, Unsure]] = {}
    for name, form in forms.items():
        norms = form.unsure()
        if norms is None:
            found[name] = form.sq_bounds()
        else:
            alike = (norms.found.dtype, norms.found.device)
            unsure.setdefault(alike, {})[name] = norms
    for group in unsure.values():
        for name, (bounds, _) in zip(group, guarded(list(group.values())), strict=True):
            found[name] = bounds
    return found


def _sharing(forms: Forms) -> contextlib.AbstractContextManager[None]:
    """Keep products of positions that several parameters have in common."""
    outer = [f for f in forms.values() if isinstance(f, Outer) and f.t > 1]
    return sharing(factor for form in outer for factor in form.given)
