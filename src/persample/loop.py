"""The native graph: the last resort (one backward pass per loss) and the exact self-check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .conditions import largest, noise, tolerance
from .enter import entered
from .errors import UsageError, VerificationError
from .forms.walk import ends
from .layout import Layout, ids_of
from .nodes import nodes_of, own_functions
from .proof import rows_of_a_sample
from .steady import unsteady

if TYPE_CHECKING:
    from .recorder import Recorder

_grad = entered(torch.autograd.grad)


def _gradient(
    recorder: Recorder, losses: Tensor, seed: Tensor, *, retain: bool
) -> list[Tensor | None]:
    """Autograd's gradient by every recorded parameter.

    A function that back-propagates in its own backward (reversible layers do) writes to ``.grad``;
    that counts, and ``.grad`` is put back.
    """
    wanted = list(recorder.parameters.selected.values())
    asked = ends([] if losses.grad_fn is None else [losses.grad_fn], wanted)
    before = [p.grad for p in wanted]
    for p in wanted:
        p.grad = None
    ledger = recorder.tape._ledger
    ledger.muted = True
    try:
        with recorder.watching(), torch.autograd.set_multithreading_enabled(False):
            found = list(_grad(losses, asked, seed, retain_graph=retain, allow_unused=True))
    except TypeError as error:  # torch.cond traces its branches in backward
        raise UsageError(
            "an operator's backward cannot run while it is recorded",
            why=f"it traces code of its own: {error}",
            fix="write torch.cond as a Python condition, or leave the operator out",
        ) from error
    else:
        for k, p in enumerate(wanted):
            if p.grad is not None:
                found[k] = p.grad if found[k] is None else found[k].to_dense() + p.grad
    finally:
        ledger.muted = False
        for p, g in zip(wanted, before, strict=True):
            p.grad = g
    return [None if f is None else f.to_dense().detach() for f in found]


def one_by_one(recorder: Recorder, losses: Tensor, *, retain_graph: bool) -> None:
    """The gradient of each loss by its own backward pass through the whole graph."""
    _expect_vector(recorder, losses)
    ledger, before = recorder.tape._ledger, _followed_before(recorder)
    rows = _rows(recorder, losses, retain_graph=retain_graph)
    ledger.clear()
    with torch._C.DisableTorchFunction():
        ledger.looped = {k: before[k] + new if k in before else new for k, new in rows.items()}
    ledger.backwards += 1


def _expect_vector(recorder: Recorder, losses: Tensor) -> None:
    """Refuse what is not one loss for each sample."""
    if losses.dim() != 1:
        raise UsageError(
            f"one loss per sample is needed, got shape {tuple(losses.shape)}",
            fix="pass a vector of losses",
        )
    if recorder.n is None:
        recorder.n = losses.shape[0]
    if losses.shape[0] != recorder.n:
        raise UsageError(
            f"{losses.shape[0]} losses for {recorder.n} samples",
            why=f"the model's inputs have {recorder.n} rows",
            fix=rows_of_a_sample(losses, recorder.n) or "record(..., n=...), one loss for each",
        )


def _followed_before(recorder: Recorder) -> dict[str, Tensor]:
    """Rows of earlier backward passes, looped or followed."""
    selected, ledger = recorder.parameters.selected, recorder.tape._ledger
    if ledger.looped is not None or not ledger.entries:
        return ledger.looped or {}
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return {name: form.fresh() for name, form in ledger.forms(selected).items()}


def _rows(recorder: Recorder, losses: Tensor, *, retain_graph: bool) -> dict[str, Tensor]:
    """Every loss's gradient, copied: a function may return the same memory every time.

    Code of the user's own may also keep a state between runs: then the first does not come back.
    """
    selected, count = recorder.parameters.selected, losses.shape[0]
    with torch._C.DisableTorchFunction():
        rows = {k: p.detach().new_zeros((count, *p.shape)) for k, p in selected.items()}
    again = count > 0 and (recorder.custom.exposed or own_functions())
    for i in range(count):
        last = i == count - 1 and not again
        found = _gradient(recorder, losses, _only(losses, i), retain=retain_graph or not last)
        with torch._C.DisableTorchFunction():
            for name, g in zip(selected, found, strict=True):
                if g is not None:
                    rows[name][i] = g
    if again:
        found = _gradient(recorder, losses, _only(losses, 0), retain=retain_graph)
        with torch._C.DisableTorchFunction():
            _expect_the_same({name: r[0] for name, r in rows.items()}, found, narrowest(losses))
    return rows


def _only(losses: Tensor, i: int) -> Tensor:
    with torch._C.DisableTorchFunction():
        seed = torch.zeros_like(losses)
        seed[i] = 1
        return seed


def _expect_the_same(
    first: dict[str, Tensor], found: list[Tensor | None], dtype: torch.dtype
) -> None:
    for (name, row), g in zip(first.items(), found, strict=True):
        now = torch.zeros_like(row) if g is None else g
        top = torch.maximum(row.abs(), now.abs()).nan_to_num(0.0, 0.0, 0.0).sum()
        if bool(((row - now).abs() > tolerance(dtype) * top).any()):
            raise unsteady(name)


def reference_of(recorder: Recorder, losses: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Random c and autograd's gradient of Σ cᵢ ℓᵢ, the losses of earlier passes included."""
    n, ledger = recorder.n or 0, recorder.tape._ledger
    with torch._C.DisableTorchFunction():
        generator = torch.Generator().manual_seed(0)
        c = (torch.rand(n, generator=generator, dtype=torch.float64, device="cpu") + 0.5).to(
            losses.device
        )
        seed = _weights(recorder, losses, recorder.look(losses), c)
    found = _gradient(recorder, losses, seed, retain=True)
    with torch._C.DisableTorchFunction():
        before = ledger.reference or [None] * len(found)
        ledger.reference = [
            a if b is None else b.clone() if a is None else a + b
            for a, b in zip(before, found, strict=True)
        ]
    return c, ledger.reference


def _weights(recorder: Recorder, losses: Tensor, state: object, c: Tensor) -> Tensor:
    if not isinstance(state, Layout):
        raise UsageError("verify=True needs one loss per sample", fix="tape.backward(losses)")
    ids = ids_of(state, losses.shape, recorder.n or 0, losses.device)
    weights = torch.where(ids >= 0, c[ids.clamp(min=0)], 0)  # a loss of no sample is a constant
    return weights.to(losses.dtype).expand(losses.shape)


def disagreement(
    recorder: Recorder, losses: Tensor, reference: tuple[Tensor, list[Tensor | None]] | None
) -> VerificationError | None:
    """Compare Σ cᵢ gᵢ from the tape with autograd's."""
    if reference is None:
        return None
    c, found = reference
    expected = [None if e is None else e.to_dense() for e in found]
    narrow = narrowest(losses)
    sizes = [0.0 if e is None else largest(e) for e in expected]
    floor = noise(narrow) / tolerance(narrow) * max(sizes, default=0.0)
    worst, where = 0.0, ""
    sums = recorder.tape.weighted_sum(c)
    for (name, mine), e, size in zip(sums.items(), expected, sizes, strict=True):
        other = torch.zeros_like(mine) if e is None else e
        error = largest(mine - other) / (max(size, floor) or 1.0)
        if not error <= worst:
            worst, where = error, name
    if worst <= tolerance(narrow):
        return None
    why = "Σ cᵢ gᵢ for random c is not the gradient of Σ cᵢ lossᵢ"
    if recorder.custom.exposed:
        why += " (nor where a hook or a custom backward is not linear, and clamps gradients)"
    return VerificationError(
        f"the tape disagrees with autograd by {worst:.1e} (relative) at {where!r}",
        why=why,
        fix='record(..., unproven="loop") is exact; please report this model',
    )


def narrowest(losses: Tensor) -> torch.dtype:
    """The least precise dtype of a gradient on its way back from the losses (autocast, casts)."""
    found = {losses.dtype}
    for node in [] if losses.grad_fn is None else nodes_of(losses.grad_fn):
        found.update(result.dtype for result in node._input_metadata)
    floating = [d for d in found if d.is_floating_point or d.is_complex]
    return max(floating, key=lambda d: torch.finfo(d).eps)
