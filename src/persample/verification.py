"""``persample.verify``: the exact self-check of a whole training step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .api import record
from .backward.one_by_one import narrowest
from .errors import PersampleError, UsageError
from .inputs.batch_samples import batch_size, following, resolved, take, tensors
from .run_state import Buffers, RandomState, largest, noise, tolerance
from .testing import LossFn
from .validation import expect_loss_fn


@dataclass(frozen=True, slots=True)
class Checked:
    """One parameter: deviation of Σ cᵢ gᵢ from autograd, and of other rows under isolation."""

    name: str
    sums: float
    isolation: float
    ok: bool


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of :func:`verify`; true if everything held."""

    n: int
    parameters: tuple[Checked, ...]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether every parameter passed."""
        return all(p.ok for p in self.parameters)

    @property
    def interacting(self) -> bool:
        """Whether gradients agree with autograd, but change when other samples are replaced."""
        return not self.ok and all(p.sums <= self.tolerance for p in self.parameters)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        width = max((len(p.name) for p in self.parameters), default=9)
        lines = [
            f"verify: {'passed' if self.ok else 'FAILED'} for n = {self.n}, "
            f"tolerance {self.tolerance:.0e}",
            f"{'parameter'.ljust(width)}  Σ c·g     isolation",
        ]
        for p in self.parameters:
            mark = "" if p.ok else "  <- wrong"
            lines.append(f"{p.name.ljust(width)}  {p.sums:.1e}   {p.isolation:.1e}{mark}")
        if self.interacting:
            lines.append(
                "isolation failed: gradients change when other samples are replaced. A statistic "
                "of the batch or of its labels, or a number taken out of torch, reaches the losses."
            )
        elif not self.ok:
            lines.append("Σ c·g failed: gradients differ from autograd's. Please report the model.")
        return "\n".join(lines)


class _State:
    """A model's buffers, and the random generators of all devices that it is on."""

    def __init__(self, model: nn.Module) -> None:
        devices = {torch.device("cpu"), *(p.device for p in model.parameters())}
        self._states: list[Buffers | RandomState] = [Buffers(model)]
        self._states += (RandomState(device) for device in devices)

    def restore(self) -> None:
        """As they were."""
        for state in self._states:
            state.restore()


def verify(model: nn.Module, loss_fn: LossFn, batch: Any, **options: Any) -> Verification:
    """Check persample on your own training step: right, or it says where not.

    Two checks, both with the random numbers and buffers of now. Σ cᵢ gᵢ for random c against
    autograd's gradient of Σ cᵢ ℓᵢ finds a gradient given to the wrong sample. Isolation finds
    losses that look at the whole batch: the inputs and labels of one sample, then of all but one,
    are replaced by another's, and no other row may move. Every parameter is judged by the size of
    its own gradients, down to what rounding of the largest may leave in it.

    >>> import torch, persample
    >>> model = torch.nn.Linear(3, 1)
    >>> x = torch.randn(4, 3)
    >>> bool(persample.verify(model, lambda m, x: m(x).square().sum(1), x))
    True

    Args:
        model: Any module; it is not changed.
        loss_fn: A function of (model, batch) that returns one loss per sample.
        batch: A tensor, or tensors in tuples, lists, mappings, dataclasses or objects; two samples
            or more.
        **options: For :func:`persample.record`. ``n`` and ``sample_ids`` may also be a key or
            attribute of the batch, or a function of it, so that they follow exchanged samples.

    Returns:
        What was found for every parameter; true if all held, and printed as a table.

    Raises:
        PersampleError: The step itself is refused, or cannot be repeated with other samples.
    """
    expect_loss_fn(loss_fn)
    options = following(options, batch)
    n = resolved(options, batch).get("n") or batch_size(batch, options.get("dim", 0))
    if n < 2:
        raise UsageError("verify needs at least two samples", fix="pass a larger batch")
    state = _State(model)
    try:
        rows, expected, c, narrow = _run(model, loss_fn, batch, options, state)
        moved = _isolation(model, loss_fn, batch, options, state, rows, n)
    finally:
        state.restore()
    limit = tolerance(narrow)
    sizes = {name: max(largest(g), largest(expected[name])) for name, g in rows.items()}
    floor = noise(narrow) / limit * max(sizes.values(), default=0.0)
    checked = []
    for name, g in rows.items():
        mine, size = torch.tensordot(c.to(g.dtype), g, 1), max(sizes[name], floor) or 1.0
        sums = largest(mine - expected[name]) / size
        apart = moved[name] / size
        checked.append(Checked(name, sums, apart, sums <= limit and apart <= limit))
    return Verification(n, tuple(checked), limit)


def _run(
    model: nn.Module, loss_fn: LossFn, batch: Any, options: dict[str, Any], state: _State
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, torch.dtype]:
    rows = _rows(model, loss_fn, batch, options, state)
    state.restore()
    losses = loss_fn(model, batch)
    if losses.dim() == 0:
        raise UsageError(
            "loss_fn must return one loss per sample, got one number",
            why="both checks compare samples with each other: a sum or a mean hides them",
            fix='reduction="none" in the loss',
        )
    losses = losses.flatten(1).sum(1) if losses.dim() > 1 else losses
    generator, n = torch.Generator().manual_seed(0), losses.shape[0]
    c = torch.rand(n, generator=generator, dtype=torch.float64, device="cpu") + 0.5
    c = c.to(losses.device)
    named = dict(model.named_parameters())
    wanted = [named[name] for name in rows]
    narrow = narrowest(losses)
    found = torch.autograd.grad(losses, wanted, c.to(losses.dtype), allow_unused=True)
    expected = {
        name: torch.zeros_like(p) if f is None else f.to_dense()
        for name, p, f in zip(rows, wanted, found, strict=True)
    }
    return rows, expected, c, narrow


def _rows(
    model: nn.Module, loss_fn: LossFn, batch: Any, options: dict[str, Any], state: _State
) -> dict[str, Tensor]:
    state.restore()
    with record(model, **resolved(options, batch)) as tape:
        tape.backward(loss_fn(model, batch))
    rows = tape.grads()
    tape.close()
    return rows


def _isolation(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    options: dict[str, Any],
    state: _State,
    rows: dict[str, Tensor],
    n: int,
) -> dict[str, float]:
    """The largest movement of rows whose own sample stays while others are replaced."""
    worst = dict.fromkeys(rows, 0.0)
    dim = options.get("dim", 0)
    for index, keep, must in _replacements(batch, n, dim):
        try:
            other = _rows(model, loss_fn, take(batch, index, n, dim), options, state)
        except Exception as error:
            if not must:
                continue  # a batch of copies that the model does not take
            if isinstance(error, PersampleError):
                raise UsageError(
                    "the isolation probe was refused although the batch itself was not",
                    why=error.what,
                    fix=f"samples in another order, or repeated, must do as well: {error.fix}",
                ) from error
            raise UsageError(
                "the step does not run with one of its samples in the place of another",
                why=f"{type(error).__name__}: {error}",
                fix="a batch in which every sample has its own index of axis 0, or its own tensor",
            ) from error
        for name, g in rows.items():
            if g.numel():
                gap = (other[name][keep] - g[keep]).abs().max()
                worst[name] = max(worst[name], float(gap.nan_to_num(nan=float("inf"))))
    return worst


def _replacements(batch: Any, n: int, dim: int) -> Iterator[tuple[Tensor, list[int], bool]]:
    """Which sample takes each place, the places that keep theirs, and whether it has to run.

    One sample is replaced by its neighbour, then all but one by the sample with the smallest or
    largest values of some input: a count over the batch does not survive all of these.
    """
    for j in sorted({0, n - 1}):
        index = torch.arange(n)
        index[j] = (j + 1) % n
        yield index, [i for i in range(n) if i != j], True
    ends: dict[int, None] = {}
    for leaf in tensors(batch):
        if leaf.dim() > dim and leaf.shape[dim] == n:
            size = leaf.detach().abs() if leaf.is_complex() else leaf.detach()
            totals = size.movedim(dim, 0).reshape(n, -1).double().sum(1)
            ends |= {int(totals.argmin()): None, int(totals.argmax()): None}
    for end in list(ends)[-4:]:  # labels and masks come last
        for alone in sorted({0, n // 2}):
            index = torch.full((n,), end)
            index[alone] = alone
            yield index, [alone], False
