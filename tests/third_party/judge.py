"""Two training steps of a row, recorded, natively, and one sample at a time.

A model is separable if the gradient of each loss of the batch is the gradient of that sample alone,
in both steps; where a model draws random numbers, or torch computes a batch of one otherwise, a
batch of copies of the sample is the judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import persample
from persample.testing import relative_error

from .runs import (
    STEPS,
    Grads,
    Skip,
    cast,
    descend,
    fresh,
    losses_of,
    narrow,
    natively,
    one_by_one,
    sums,
    varies,
)  # fmt: skip
from .subject import Row

TIGHT, LOOSE = 1e-9, 2e-4
FIXED = "exact by its fix"  # refused, and exact where the error's own fix is followed
KINDS = (
    "exact", FIXED, "refused by right", "refused needlessly", "stated limit", "wrong", "crash",
    "skipped",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happened, a line about it, and the refusal's parts if there was one."""

    kind: str
    detail: str = ""
    step: int = 0
    refusal: dict[str, str] | None = None


@dataclass(slots=True)
class Trial:
    """How a row is run: dtype, mode, and the gradients it should have in each step."""

    row: Row
    dtype: torch.dtype
    training: bool
    truth: list[Grads]
    separable: bool
    tolerance: float
    notes: list[str]


# ---------------------------------------------------------------------- a trial


def mode(row: Row, dtype: torch.dtype) -> tuple[bool, bool]:
    """Training mode unless it draws random numbers or normalises over the batch; and the former."""
    model = fresh(row, dtype, True).model
    normalised = any("BatchNorm" in type(m).__name__ for m in model.modules())
    if not normalised and not varies(row, dtype, True):
        return True, False
    return False, varies(row, dtype, False)


def prepared(row: Row, dtype: torch.dtype) -> Trial:
    """Run it natively and alone."""
    training, drawn = mode(row, dtype)
    notes = ([] if training else ["eval"]) + (["random numbers"] if drawn else [])
    together, after = natively(row, dtype, training)
    wide = dtype is torch.float64 and not narrow(row, training)
    tolerance = TIGHT if wide else LOOSE
    if not wide:
        notes.append("float32")
    apart = float("inf")
    for copies in (True,) if drawn else (False, True):
        alone = one_by_one(row, dtype, training, after, copies=copies)
        apart = max(relative_error(a, b) for a, b in zip(together, alone, strict=True))
        if apart < tolerance:
            if copies and not drawn:
                notes.append("alone in a batch of copies")
            break
    separable = apart < tolerance
    if not separable:
        notes.append(f"not separable ({apart:.0e})")
    return Trial(row, dtype, training, together, separable, tolerance, notes)


def attempt(trial: Trial, unproven: str = "refuse", *, marked: bool = False) -> Verdict:
    """Two recorded steps; ``marked``: every tensor of real numbers in the batch is marked."""
    step, error = 0, 0.0
    try:
        subject = fresh(trial.row, trial.dtype, trial.training)
        for step in range(STEPS):
            batch = cast(subject.batch, trial.dtype)
            options = {"unproven": unproven, **subject.options(batch)}
            with persample.record(subject.model, **options) as tape:
                subject.prepare(tape, batch)
                if marked:
                    mark(tape, batch)
                tape.backward(losses_of(subject, batch, step))
            found = compared(tape, trial.truth[step], options["unproven"])
            error = found if not found <= error else error
            if not error < trial.tolerance:
                return Verdict("wrong", f"{error:.0e}", step + 1)
            descend(subject.model, sums(trial.truth[step]))
    except persample.PersampleError as refusal:
        parts = {k: str(getattr(refusal, k)) for k in ("what", "where", "why", "fix")}
        kind = "refused needlessly" if trial.separable else "refused by right"
        return Verdict(kind, parts["what"], step + 1, parts)
    except Exception as other:
        return Verdict("crash", located(other), step + 1)
    if not trial.separable and subject.limit:
        return Verdict("stated limit", subject.limit)
    if not trial.separable:
        return Verdict("wrong", "samples interact and nothing was said", step)
    return Verdict("exact", f"{error:.0e}")


def mark(tape: persample.Tape, batch: Any) -> None:
    """Tell that the tensors of a batch hold samples."""
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tape.mark(tensor)


def followed(trial: Trial, refusal: dict[str, str]) -> tuple[str, Verdict]:
    """Do what a refusal says is its fix: which one, and what happens then."""
    if "tape.mark(x)" in refusal["fix"] and "loop" not in refusal["fix"]:
        return "tape.mark(x)", attempt(trial, marked=True)
    return 'unproven="loop"', attempt(trial, "loop")


def compared(tape: persample.Tape, truth: Grads, unproven: str) -> float:
    """The largest error of gradients, norms and the clipped sum.

    A loop over the losses of a model that is not proven answers gradients alone.
    """
    error = relative_error(tape.grads(), truth)
    if unproven == "loop":
        return error
    flat = torch.cat(
        [torch.view_as_real(g.to(torch.complex128)).flatten(1) for g in truth.values()], 1
    )
    norms = flat.norm(dim=1)
    bound = float(norms.median())
    share = (bound / norms.clamp(min=1e-300)).clamp(max=1)
    clipped = {name: torch.tensordot(share.to(g.dtype), g, 1) for name, g in truth.items()}
    off = float((tape.norms().double() - norms).abs().max() / norms.max())
    return max(error, off, relative_error(tape.clipped_sum(bound), clipped))


def located(error: BaseException) -> str:
    """The error and the innermost line of it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        path = trace.tb_frame.f_code.co_filename.split("/")
        where = f" at {'/'.join(path[-2:])}:{trace.tb_lineno}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"


def judge(row: Row) -> Verdict:
    """The verdict in float64, or in float32 where float64 does not run."""
    before, reason = torch.get_default_dtype(), ""
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            trial = prepared(row, dtype)
            verdict = attempt(trial)
            details = [verdict.detail, *trial.notes]
            kind = verdict.kind
            if kind == "refused needlessly" and verdict.refusal is not None:
                fix, then = followed(trial, verdict.refusal)
                offered = fix.partition("(")[0] in verdict.refusal["fix"]
                details.append(f"with {fix}: {then.kind}")
                kind = FIXED if offered and then.kind == "exact" else kind
            return Verdict(kind, "; ".join(details), verdict.step, verdict.refusal)
        except Skip as skip:
            return Verdict("skipped", str(skip))
        except Exception as error:
            reason = reason or located(error)
        finally:
            torch.set_default_dtype(before)
    return Verdict("skipped", reason)
