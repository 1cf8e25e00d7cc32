"""The native graph: the last resort (one backward pass per loss) and the exact self-check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .enter import entered
from .errors import UsageError, VerificationError
from .layout import Layout, ids_of

if TYPE_CHECKING:
    from .recorder import Recorder

_grad = entered(torch.autograd.grad)


def one_by_one(recorder: Recorder, losses: Tensor, *, retain_graph: bool) -> None:
    """The gradient of each loss by its own backward pass through the whole graph."""
    ledger = recorder.tape._ledger
    if losses.dim() != 1:
        raise UsageError(
            f"one loss per sample is needed, got shape {tuple(losses.shape)}",
            fix="pass a vector of losses",
        )
    if recorder.n is None:
        recorder.n = losses.shape[0]
    if losses.shape[0] != recorder.n:
        raise UsageError(f"{losses.shape[0]} losses for {recorder.n} samples")
    rows: dict[str, list[Tensor]] = {name: [] for name in recorder.parameters.selected}
    wanted = list(recorder.parameters.selected.values())
    ledger.muted = True
    try:
        for i in range(losses.shape[0]):
            last = i == losses.shape[0] - 1
            with torch._C.DisableTorchFunction():
                seed = torch.zeros_like(losses)
                seed[i] = 1
            with recorder.watching():
                found = _grad(
                    losses, wanted, seed, retain_graph=retain_graph or not last, allow_unused=True
                )
            for (name, parameter), g in zip(
                recorder.parameters.selected.items(), found, strict=True
            ):
                rows[name].append(torch.zeros_like(parameter) if g is None else g.to_dense())
    finally:
        ledger.muted = False
    new = {
        name: torch.stack(r)
        if r
        else recorder.parameters.selected[name].new_zeros(
            (0, *recorder.parameters.selected[name].shape)
        )
        for name, r in rows.items()
    }
    if ledger.looped is None:
        ledger.looped = {name: g.detach() for name, g in new.items()}
        if ledger.entries:
            raise UsageError("a proven and an unproven backward in one recording")
    else:
        ledger.looped = {name: ledger.looped[name] + g for name, g in new.items()}
    ledger.backwards += 1


def reference(recorder: Recorder, losses: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Random c and autograd's gradient of Σ cᵢ ℓᵢ."""
    generator = torch.Generator().manual_seed(
        torch.initial_seed() % (1 << 31) + recorder.tape._ledger.backwards
    )
    n = recorder.n or 0
    c = (torch.rand(n, generator=generator, dtype=torch.float64) + 0.5).to(losses.device)
    ledger = recorder.tape._ledger
    ledger.muted = True
    try:
        with torch._C.DisableTorchFunction():
            state = recorder.look(losses)
            seed = _weights(recorder, losses, state, c)
        with recorder.watching():
            found = _grad(
                losses,
                list(recorder.parameters.selected.values()),
                seed,
                retain_graph=True,
                allow_unused=True,
            )
    finally:
        ledger.muted = False
    return c, list(found)


def _weights(recorder: Recorder, losses: Tensor, state: object, c: Tensor) -> Tensor:
    if not isinstance(state, Layout):
        raise UsageError("verify=True needs one loss per sample", fix="tape.backward(losses)")
    ids = ids_of(state, losses.shape, recorder.n or 0, losses.device)
    return c[ids].to(losses.dtype).expand(losses.shape)


def disagreement(
    recorder: Recorder, losses: Tensor, reference: tuple[Tensor, list[Tensor | None]] | None
) -> VerificationError | None:
    """Compare Σ cᵢ gᵢ from the tape with autograd's."""
    if reference is None:
        return None
    c, found = reference
    expected = [None if e is None else e.to_dense() for e in found]
    top = max((float(e.abs().max()) for e in expected if e is not None and e.numel()), default=0.0)
    worst, where = 0.0, ""
    for (name, mine), e in zip(recorder.tape.weighted_sum(c).items(), expected, strict=True):
        other = torch.zeros_like(mine) if e is None else e
        error = float((mine - other).abs().max()) / (top or 1.0) if mine.numel() else 0.0
        if not error <= worst:
            worst, where = error, name
    if worst <= tolerance(losses.dtype):
        return None
    return VerificationError(
        f"the tape disagrees with autograd by {worst:.1e} (relative) at {where!r}",
        why="Σ cᵢ gᵢ for random c is not the gradient of Σ cᵢ lossᵢ",
        fix='record(..., unproven="loop") is exact; please report this model',
    )


def tolerance(dtype: torch.dtype) -> float:
    """Deviation, relative to the largest entry, that rounding alone can explain."""
    return float(200 * torch.finfo(dtype).eps ** 0.75)
