"""``for step in training``: the loop over batches and micro-batches, by a loss function."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from ..errors import UsageError
from ..tape.tape import Tape
from . import checks
from .parallel import Processes, bare
from .plan import Plan
from .trial import verify_on_synthetic_rows
from .users import Part


class LoopForm(Protocol):
    """The loop over batches that the short form writes for its user."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor] | None
    options: dict[str, Any]
    processes: Processes
    plan: Plan
    verified: str

    @property
    def steps(self) -> int:
        """How many were done."""

    def batches(self) -> Iterator[Any]:
        """The Poisson batches that are left."""

    def record(self, **options: Any) -> contextlib.AbstractContextManager[Tape]:
        """A recording of one micro-batch."""

    def step(self) -> None:
        """One update."""


def steps(training: LoopForm) -> Iterator[int]:
    """Do the steps that are left; yields the number of steps done, after each update."""
    if training.loss_fn is None:
        raise UsageError(
            "for step in training needs a loss_fn",
            fix="Training(..., loss_fn=lambda model, batch: one loss per sample), or the loop over "
            "training.batches()",
        )
    shown = training.processes.rank == 0
    with progress(training.plan.steps, training.steps, shown=shown) as advance:
        for parts in training.batches():
            for batch, part in zip(parts, parts.parts, strict=True):
                record_losses(training, batch, part)
            training.step()
            advance()
            yield training.steps


def record_losses(training: LoopForm, batch: Any, part: Part) -> None:
    """Record one micro-batch; before the first, check persample on synthetic rows."""
    assert training.loss_fn is not None
    if not training.verified:
        training.verified = "not tried: other processes hold parts of the model"
        if training.processes.independent:
            training.verified = verify_on_synthetic_rows(
                bare(training.model), training.loss_fn, batch, len(part.rows)
            )
    with training.record(**training.options) as tape:
        losses = training.loss_fn(training.model, batch)
        checks.expect_losses(losses, len(part.rows))
        tape.backward(losses)


@contextlib.contextmanager
def progress(total: int, initial: int, *, shown: bool = True) -> Iterator[Callable[[], object]]:
    """A bar on a terminal, where tqdm is installed: it shows nothing that is not public."""
    if not shown or not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda: None
        return
    bar = importlib.import_module("tqdm").tqdm(total=total, initial=initial, unit="step")
    try:
        yield bar.update
    finally:
        bar.close()
