"""What must hold before losses are back-propagated: whose they are, and that it can be followed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .errors import LOOP, MixedSamplesError, Reason, UsageError
from .layout import Additive, Layout, Mixed
from .marks import Derived

if TYPE_CHECKING:
    from .recorder import Recorder


def expect_history(recorder: Recorder, losses: Tensor) -> None:
    """Refuse losses that nothing leads to, unless they are a parameter, which is told otherwise."""
    if losses.is_leaf and id(losses) not in recorder.parameters.slots:
        raise UsageError(
            "the losses have no history",
            why="a gradient can be taken by them, but none goes on from them to a parameter",
            fix="pass the tensor that the model's outputs were computed to, not a detached or "
            "wrapped one",
        )


def prove(recorder: Recorder, losses: Tensor) -> tuple[bool, Any]:
    """Whether the losses are one number, and what couples them; else why they are refused."""
    state = recorder.look(losses)
    if isinstance(state, Derived):
        recorder.inputs.expect_samples()
        known = any(isinstance(mark.state, Layout) for mark in recorder.marks.table.values())
        why = "a regulariser has no per-sample gradient"
        fix = "give it its own backward() after tape.set_grad(...)"
        if not known:
            why += ", and no tensor was recognised as holding samples"
            fix += "; if it takes data: tape.mark(x) before"
        elif losses.numel() != 1:
            why = "no samples were followed to it: constants, or torch.func and nested tensors"
            fix = "tape.mark(x) for data that the model does not receive, or unproven='loop'"
        raise MixedSamplesError("the loss depends on parameters alone", why=why, fix=fix)
    n = recorder.n
    advice = recorder.inputs.guess.advice(losses, n)
    if isinstance(state, Mixed) and (n is None or advice):
        error = state.reason.error("samples meet before the loss", fix=LOOP)
        fix = f"{advice}; or {error.fix}" if advice else error.fix
        raise MixedSamplesError(error.what, where=error.where, why=error.why, fix=fix)
    if n is None:
        raise UsageError(
            "no samples were seen",
            why="no module of the model was called with tensors inside the block",
            fix="call the model on its inputs inside the block, or tape.mark(x) for data that "
            "parameters are used with directly",
        )
    return expect_losses(losses, state, n)


def expect_losses(losses: Tensor, state: Any, n: int) -> tuple[bool, Reason | None]:
    """Refuse what is not a proven vector of losses or sum over samples; (is scalar, coupling)."""
    if isinstance(state, Layout):
        _expect_rows(losses, state, n)
        return False, state.coupled
    if isinstance(state, Additive):
        if losses.numel() != 1:
            raise MixedSamplesError(
                f"each element of the losses {tuple(losses.shape)} is a sum over samples",
                why="axis 0 does not hold the samples",
                fix="pass one loss per sample",
            )
        return True, state.coupled
    if isinstance(state, Mixed):
        each = "pass one loss per sample: what joins them is no sum or mean over samples"
        fix = LOOP if losses.dim() else each
        error = state.reason.error("samples meet before the loss", fix=fix)
        fix = rows_of_a_sample(losses, n)
        if fix:
            fix += f"; or, {state.reason.fix}" if state.reason.fix else ""
            raise MixedSamplesError(error.what, where=error.where, why=error.why, fix=fix)
        raise error
    raise MixedSamplesError(
        f"the losses {tuple(losses.shape)} hold no samples",
        why="nothing the recorder followed leads from the samples to them",
        fix="call the model inside the block; tape.mark(x) tensors it does not receive as input",
    )


def _expect_rows(losses: Tensor, layout: Layout, n: int) -> None:
    if n == 1:
        return
    if not layout.axes:
        raise MixedSamplesError(
            f"the losses {tuple(losses.shape)} belong to one sample of {n}",
            why="the others have no loss",
            fix="n must count the samples that have losses: record(..., n=..., sample_ids=...)",
        )
    if layout.axes != (0,):
        raise MixedSamplesError(
            f"the losses {tuple(losses.shape)} do not hold the samples on axis 0",
            why=f"they are on axis {', '.join(map(str, layout.axes))}",
            fix="bring the samples to axis 0, or pass losses.sum()",
        )
    if losses.dim() == 0:
        raise MixedSamplesError("the loss belongs to a single sample", fix="pass one per sample")


def rows_of_a_sample(losses: Tensor, n: int) -> str:
    """What to do where there are fewer losses than rows: pairs that were joined to one batch."""
    count = losses.shape[0] if losses.dim() == 1 else 0
    if not count or count == n or n % count:
        return ""
    return (
        f"if {n // count} of the {n} rows make up a sample: record(..., n={count}, "
        f"sample_ids=torch.arange({n}) % {count}), or // {n // count} if they lie side by side; or "
        "tape.mark(part) for every part before they are joined"
    )


def expect_one_each(recorder: Recorder, *, scalar: bool) -> None:
    """Refuse one number where every loss needs a pass of its own."""
    if scalar and recorder.second_order:
        raise UsageError(
            "one loss per sample is needed where gradients are differentiated again",
            why="each sample's gradient takes a backward pass of its own loss",
            fix="tape.backward(losses) with a vector of losses",
        )


def expect_possible(recorder: Recorder) -> None:
    """Refuse a backward pass that this kind of recording cannot follow."""
    if recorder.native and recorder.custom.reentrant:
        raise UsageError(
            "verify=True and unproven='loop' cannot pass reentrant checkpointing",
            why="torch allows only a plain backward through it",
            fix="checkpoint(..., use_reentrant=False)",
        )
    if recorder.custom.by_hand and recorder.custom.reentrant:
        raise UsageError(
            "reentrant checkpointing where weights have hooks, or pass custom functions",
            why="it back-propagates its part by itself: they would see a part of each gradient",
            fix="checkpoint(..., use_reentrant=False)",
        )
    ledger = recorder.tape._ledger
    if ledger.backwards and recorder.custom.by_hand:
        raise UsageError(
            "a second backward where weights have hooks, or pass custom functions",
            why="what these make of two gradients is not what they make of their sum",
            fix="tape.backward(a + b)",
        )
    lean = ledger.lean
    if lean is not None and lean.done:
        raise UsageError(
            "a second backward in a lean recording",
            why="norms of a sum are not sums of norms, and nothing of the first was kept",
            fix="tape.backward(a + b), or record without lean",
        )
