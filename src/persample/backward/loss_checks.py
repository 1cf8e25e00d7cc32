"""What must hold before losses are back-propagated: whose they are, and that it can be followed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ..autograd_graph import ends_in, leaves_of, nodes_of, of_user, own_functions
from ..errors import LOOP, MixedSamplesError, PersampleError, Reason, UsageError
from ..inputs.inputs import Inputs
from ..layouts import Additive, Constant, Layout, Mixed
from ..uses import ANCHOR, Context, Derived
from ..validation import number, shown


def expect_tensor(context: Context, losses: Tensor, scale: float | Tensor | None) -> float:
    """Refuse what is no tensor of losses; the factor that scales them."""
    if not isinstance(losses, Tensor):
        several = isinstance(losses, (list, tuple))
        fix = "torch.stack(losses)" if several else "F.cross_entropy(..., reduction='none')"
        raise UsageError(f"backward takes a tensor of losses, got {shown(losses)}", fix=fix)
    if losses.is_complex():
        raise UsageError("losses must be real", fix="pass losses.real, or losses.abs()")
    if losses.layout is not torch.strided:
        raise UsageError(f"losses must be dense, got {shown(losses)}", fix="losses.to_dense()")
    weights = "multiply the losses by weights of their own before backward"
    factor = 1.0 if scale is None else number(scale, "scale", fix=weights)
    if not factor > 0 or factor == float("inf"):
        raise UsageError(
            f"scale must be a positive finite number, got {scale!r}",
            fix="pass scaler.get_scale(), or leave it out",
        )
    if not losses.requires_grad:
        unused = ", or use none of the chosen parameters"
        raise UsageError(
            "the losses carry no gradient",
            why="they were detached, made integers, computed under no_grad, or from constants"
            + (unused if context.parameters.partial else ""),
            fix="compute them inside the block with gradients enabled",
        )
    if losses.is_floating_point() and factor > torch.finfo(losses.dtype).max:
        raise UsageError(
            f"scale = {factor:g} is not a number of the losses' {losses.dtype}",
            fix="compute the losses in float32 (autocast does), or take a smaller scale",
        )
    return factor


def prove(context: Context, inputs: Inputs, losses: Tensor) -> tuple[bool, Any]:
    """Whether the losses are one number, and what couples them; else why they are refused."""
    state = context.look(losses)
    if isinstance(state, Derived):
        inputs.expect_samples()
        context.batches.expect_one_size(context.n)
        marks = context.states.table.values()
        known = any(isinstance(mark.state, Layout) for mark in marks)
        why = "a regulariser has no per-sample gradient"
        fix = "give it its own backward() after tape.set_grad(...)"
        if not known:
            why += ", and no tensor was recognised as holding samples"
            fix += "; if it takes data: tape.mark(x) before"
        elif losses.numel() != 1:
            why = "no samples were followed to it: constants, or torch.func and nested tensors"
            fix = "tape.mark(x) for data that the model does not receive, or unproven='loop'"
        raise MixedSamplesError("the loss depends on parameters alone", why=why, fix=fix)
    n = context.n
    advice = inputs.guess.advice(losses, n) or _coincidence(inputs, state)
    if isinstance(state, Mixed) and (n is None or advice):
        error = state.reason.error("samples interact before the loss", fix=LOOP)
        fix = f"{advice}; or {error.fix}" if advice else error.fix
        raise MixedSamplesError(error.what, where=error.where, why=error.why, fix=fix)
    if n is None:
        raise UsageError(
            "no samples were seen",
            why="no module of the model was called with tensors inside the block",
            fix="call the model on its inputs inside the block, or tape.mark(x) for data that "
            "parameters are used with directly",
        )
    return expect_losses(losses, state, n, numbered=bool(context.patterns))


def _coincidence(inputs: Inputs, state: Any) -> str:
    """Which input may hold no samples, if samples interact where it is used; not the first."""
    if not isinstance(state, Mixed) or "constants=" in state.reason.fix:
        return ""
    later = [seen for seen in inputs.seen[1:] if seen.samples and not seen.declared]
    for seen in later:
        if seen.shape in state.reason.shapes:
            what = name = repr(seen.path)
            if sum(seen.path == other.path for other in inputs.seen) > 1:
                what, name = f"the tensor {seen.shape} given as {name}", "tensor"
            return f"if {what} holds no samples: record(..., constants=({name},))"
    return ""


def expect_one_each(context: Context, *, scalar: bool) -> None:
    """Refuse one number where every loss needs a pass of its own."""
    if scalar and context.user_code.second_order:
        raise UsageError(
            "one loss per sample is needed where gradients are differentiated again",
            why="each sample's gradient takes a backward pass of its own loss",
            fix="tape.backward(losses) with a vector of losses",
        )


def expect_possible(context: Context, *, done: bool) -> None:
    """Refuse a backward pass that this kind of recording cannot follow.

    ``done``: a lean recording has had its first pass.
    """
    code, again = context.user_code, "checkpoint(..., use_reentrant=False)"
    refused = (
        (
            context.options.native and code.reentrant,
            "verify=True and unproven='loop' cannot pass reentrant checkpointing",
            "torch allows only a plain backward through it",
            again,
        ),
        (
            code.by_hand and code.reentrant,
            "reentrant checkpointing where weights have hooks, or pass custom functions",
            "it back-propagates its part by itself: they would see a part of each gradient",
            again,
        ),
        (
            code.by_hand and context.backward.count,
            "a second backward where weights have hooks, or pass custom functions",
            "what these make of two gradients is not what they make of their sum",
            "tape.backward(a + b)",
        ),
        (
            done,
            "a second backward in a lean recording",
            "norms of a sum are not sums of norms, and nothing of the first was kept",
            "tape.backward(a + b), or record without lean",
        ),
    )
    for found, what, why, fix in refused:
        if found:
            raise UsageError(what, why=why, fix=fix)


def expect_history(context: Context, losses: Tensor) -> None:
    """Refuse losses that nothing leads to, except a parameter, which is reported otherwise."""
    if losses.is_leaf and id(losses) not in context.parameters.slots:
        raise UsageError(
            "the losses have no history",
            why="a gradient can be taken by them, but none goes on from them to a parameter",
            fix="pass the tensor that the model's outputs were computed to, not a detached or "
            "wrapped one",
        )


def of_constants(context: Context, node: Any) -> bool:
    """Whether a custom function took constants alone, some of them with gradients.

    Its forward ran under the recorder: what it had read of samples would show on its result.
    """
    if not isinstance(node, BackwardCFunction):
        return False
    ends = leaves_of(node)
    if not ends or any(leaf is ANCHOR for leaf in ends):
        return False
    return all(isinstance(context.look(leaf), Constant) for leaf in ends)


def expect_followed(context: Context, roots: Sequence[Any]) -> PersampleError | None:
    """Why not, where a function of the block is on the way whose results were not its own.

    A forward that enables gradients may return a tensor that had a history, and was known.
    """
    if not own_functions():
        return None
    user_code, slots = context.user_code, context.parameters.slots
    for node in (node for root in roots for node in nodes_of(root)):
        if not of_user(node):
            continue
        known = id(node) in user_code.followed or node in (*user_code.by_hand, *user_code.vouched)
        if known or node._sequence_nr() < user_code.start or of_constants(context, node):
            continue
        if not ends_in(node, slots):
            name = type(node).__name__
            why = f"the forward of {name} returns a tensor with a history of its own"
            return Reason("a custom function", why, (), None).error(
                "gradients cannot be followed in backward",
                fix="return the tensor detached: torch gives it the function's history",
            )
    return None


def expect_losses(
    losses: Tensor, state: Any, n: int, *, numbered: bool
) -> tuple[bool, Reason | None]:
    """Refuse what is not a proven vector of losses or sum over samples; (is scalar, coupling).

    ``numbered``: the user said whose rows are whose.
    """
    if isinstance(state, Layout):
        _expect_rows(losses, state, n, numbered=numbered)
        return False, state.coupled
    if isinstance(state, Additive):
        if losses.numel() != 1:
            raise MixedSamplesError(
                f"each element of the losses {tuple(losses.shape)} is a sum over samples",
                why="axis 0 does not hold the samples",
                fix=rows_of_a_sample(losses, n) or "pass one loss per sample",
            )
        return True, state.coupled
    if isinstance(state, Mixed):
        each = "pass one loss per sample: what joins them is no sum or mean over samples"
        fix = LOOP if losses.dim() else each
        error = state.reason.error("samples interact before the loss", fix=fix)
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


def _expect_rows(losses: Tensor, layout: Layout, n: int, *, numbered: bool) -> None:
    if n == 1 or (numbered and losses.dim() and not layout.axes):
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
