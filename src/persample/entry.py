"""Where users come in: ``persample.record``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from .errors import UsageError
from .forms import BUDGET, LEAN
from .lean import Ahead
from .parameters import Params
from .queries import expect_direction, expect_projection
from .recorder import Recorder


def record(
    model: nn.Module,
    *,
    n: int | None = None,
    dim: int = 0,
    constants: Iterable[str | int | Tensor] = (),
    sample_ids: Tensor | None = None,
    params: Params = None,
    rules: dict[Any, Callable[..., Any]] | None = None,
    unproven: str = "refuse",
    verify: bool = False,
    lean: bool | Ahead = False,
    positions: bool = False,
    budget: int | None = None,
) -> Recorder:
    """Record one ordinary forward and backward of an unmodified model.

    >>> import torch, persample
    >>> model = torch.nn.Linear(3, 1)
    >>> with persample.record(model) as tape:
    ...     losses = model(torch.ones(2, 3)).square().squeeze(1)
    ...     tape.backward(losses)
    >>> tape.grads()["weight"].shape
    torch.Size([2, 1, 3])

    ``n``: number of samples (else the first input tells). ``dim``: the axis of the samples in the
    model's inputs. ``constants``: inputs that hold no samples although a size matches, by name,
    position or tensor. ``sample_ids``: the sample of every input row (needs ``n``). ``params``:
    names, or a predicate on names. ``rules``: overrides for one recording. ``unproven``: "refuse",
    or "loop" to fall back to one backward pass per sample. ``verify``: check this step against
    autograd. ``lean``: keep nothing; norms are taken during the backward pass, and what
    :class:`persample.Ahead` names; every other question of one tape is one more backward pass. A
    weighted or clipped sum comes last: it frees the graph as it passes, like any backward, unless
    ``tape.backward(losses, retain_graph=True)`` keeps it.
    ``positions``: keep what :meth:`Tape.positions` needs (inputs and output gradients of biases and
    norm layers, too).
    ``budget``: bytes of scratch memory that a question may take beyond its result (64 MiB; 2 MiB if
    lean); larger work is cut into tiles. One row of one parameter is the least.
    """
    _expect_sensible(model, n, sample_ids, unproven)
    _expect_lean(lean, positions=positions, native=verify or unproven == "loop")
    budget = (LEAN if lean else BUDGET) if budget is None else budget
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise UsageError(
            f"budget must be a positive number of bytes, got {budget!r}",
            fix="leave it out, or name bytes: budget=64 << 20",
        )
    recorder = Recorder(
        model,
        n=n,
        dim=dim,
        constants=constants,
        sample_ids=sample_ids,
        params=params,
        rules=rules,
        unproven=unproven,
        verify=verify,
        lean=lean,
        positions=positions,
        budget=budget,
    )
    if isinstance(lean, Ahead) and lean.direction is not None:
        selected = recorder.parameters.selected
        expect_direction(lean.direction, selected, selected)
    return recorder


def _expect_sensible(model: object, n: object, sample_ids: object, unproven: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"record takes an nn.Module, got {type(model).__name__}",
            fix="put the function and its parameters into a module",
        )
    if unproven not in ("refuse", "loop"):
        raise UsageError(
            f"unproven must be 'refuse' or 'loop', got {unproven!r}", fix="leave it out"
        )
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
        raise UsageError(
            f"n must be a non-negative integer, got {n!r}", fix="n=len(x), or leave it out"
        )
    if sample_ids is not None and n is None:
        raise UsageError("sample_ids needs n, the number of samples", fix="record(model, n=...)")


def _expect_lean(lean: object, *, positions: bool, native: bool) -> None:
    if not isinstance(lean, (bool, Ahead)):
        raise UsageError(
            f"lean must be a bool or persample.Ahead(...), got {lean!r}", fix="lean=True"
        )
    if lean and native:
        raise UsageError(
            "lean=True goes with neither verify=True nor unproven='loop'",
            fix="leave one of them out: these keep the whole graph",
        )
    if lean and positions:
        raise UsageError(
            "lean=True keeps nothing, so positions cannot be asked of it",
            fix="record(model, positions=True) without lean",
        )
    if isinstance(lean, Ahead) and lean.projection is not None:
        expect_projection(*lean.projection)
