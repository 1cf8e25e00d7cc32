"""One pass over the data: record every batch, keep a few numbers and a projection per sample."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..api import record
from ..errors import PersampleError, UsageError
from ..inputs.batch_samples import Pick, batch_size, moved, resolved, take
from ..run_state import Buffers
from ..tape.tape import Tape
from ..testing import LossFn
from ..verification import Verification, verify
from .contents import Watcher
from .cost import Cost, Stopwatch
from .ids import Ids
from .order import Order, order_of
from .progress import Progress
from .reading import expect_losses, labels_of, predictions_of, single
from .show import Gallery, Show
from .store import Rows, Scratch
from .whole_samples import Whole

PROBED = 4  # samples of the first batch that the self-check looks at


@dataclass(slots=True)
class Plan:
    """What to do in the pass."""

    ids: Pick | Iterable[Any] | None = None
    labels: Pick | Literal[False] | None = None
    show: Show = field(default_factory=Show)
    limit: int | None = None
    device: torch.device | str | None = None
    width: int = 128
    seed: int = 0
    check: bool = True
    progress: bool | None = None
    memory: int = 64 << 20
    scratch: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


class Collected:
    """What is kept of every sample; the first ``count`` rows of everything are complete."""

    def __init__(self, model: nn.Module, plan: Plan, order: Order) -> None:
        self.scratch = Scratch(plan.scratch, plan.memory)
        self.model_name = type(model).__name__
        self.dropout = any(
            m.training and isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0
            for m in model.modules()
        )
        self.count = self.batches = 0
        self.interrupted = False
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.ids, self.limited = Ids(plan.ids, self.scratch, order), plan.limit is not None
        self.gallery = Gallery(plan.show, self.scratch)
        self.whole = Whole(self.scratch)
        self.losses, self.norms = Rows(self.scratch), Rows(self.scratch)
        self.parameter_norms, self.projections = Rows(self.scratch), Rows(self.scratch)
        self.labels, self.predictions = Rows(self.scratch), Rows(self.scratch)
        self.contents, self.noise_parts = Rows(self.scratch), Rows(self.scratch)
        self.verification: Verification | None = None
        self.unverified = "not asked for"
        self.without_positions = ""
        self.position_names: list[str] | None = None
        self.slow: tuple[str, ...] = ()
        self.ambiguous: tuple[str, ...] = ()
        self.cost = Cost()

    def rows(self, rows: Rows) -> Tensor | None:
        """A column, if every sample has it."""
        return rows.tensor()[: self.count] if len(rows) >= self.count > 0 else None


def collect(model: nn.Module, loss_fn: LossFn, batches: Iterable[Any], plan: Plan) -> Collected:
    """Record every batch. Ctrl-C ends the pass; what was seen until then is kept."""
    found = Collected(model, plan, order_of(batches))
    total = _length(batches, plan.limit)
    progress = Progress(total, shown=plan.progress)
    watch = Stopwatch(model, loss_fn, found.cost, total)
    try:
        with untouched(model):
            if plan.device is not None:
                model.to(plan.device)
            for batch in itertools.islice(batches, plan.limit):
                _one_batch(model, loss_fn, moved(batch, plan.device), plan, found, watch)
                progress.update(found.batches, found.count)
    except KeyboardInterrupt:
        if not found.count:
            raise
        found.interrupted = True
    finally:
        progress.close()
    if not found.count:
        raise UsageError(
            "the data set is empty",
            why=f"{found.batches} batches with no samples" if found.batches else "no batch came",
            fix="pass an iterable that yields at least one batch with samples",
        )
    return found


def _one_batch(
    model: nn.Module, loss_fn: LossFn, batch: Any, plan: Plan, found: Collected, watch: Stopwatch
) -> None:
    try:
        if _size(batch, plan) == 0:
            found.batches += 1
            return
        if plan.check and found.verification is None and not found.count:
            _check(model, loss_fn, batch, plan, found)
        with watch.batch(batch):
            _record(model, loss_fn, batch, plan, found, watch)
        found.batches += 1
    except PersampleError as error:
        if not found.batches:
            raise
        kind = type(error)
        what = f"batch {found.batches + 1}: {error.what}"
        raise kind(what, where=error.where, why=error.why, fix=error.fix) from error
    except Exception as error:
        told = single(batch, error)
        if told is None:
            raise
        raise told from error


def _record(
    model: nn.Module, loss_fn: LossFn, batch: Any, plan: Plan, found: Collected, watch: Stopwatch
) -> None:
    """Record one batch and keep its rows; they count once all are there."""
    outputs: list[Any] = []
    watcher = Watcher()
    options = resolved(plan.options, batch)
    hooks = [model.register_forward_hook(lambda module, args, output: outputs.append(output))]
    hooks.append(watcher.watch(model))
    try:
        with watch.part("record"), record(model, **options) as tape:
            losses = loss_fn(model, batch)
            expect_losses(losses, tape.n)
            tape.backward(losses)
    finally:
        for hook in hooks:
            hook.remove()
    n = tape.n
    with watch.part("norms"):
        by_name = list(tape.parameter_norms().values())
        sizes = torch.stack([s.float().to(by_name[0].device) for s in by_name], 1).cpu()
        norms = sizes.double().square().sum(1).sqrt()
    with watch.part("project"):
        projections = tape.project(plan.width, seed=plan.seed).float().cpu()
    if not found.count:
        _first(model, tape, found)
    labels = labels_of(batch, plan.labels, n)
    predictions = predictions_of(outputs[-1] if outputs else None, labels, n)
    tape.close()
    with watch.part("compare"):
        ids, dim = found.ids.carried(batch), plan.options.get("dim", 0)
        contents = watcher.fingerprints(n, dim, ids=ids)
    found.ids.add(batch, n)
    found.gallery.add(batch, n)
    if len(found.gallery.tokens):
        found.whole.add(batch, n, found.count)
    for rows, values in (
        (found.losses, losses.detach().float()),
        (found.norms, norms),
        (found.parameter_norms, sizes),
        (found.projections, projections),
        (found.labels, labels),
        (found.predictions, predictions),
        (found.contents, contents),
        (found.noise_parts, _noise_part(norms, projections)),
    ):
        if values is not None:
            rows.append(values)
    found.count += n


def _first(model: nn.Module, tape: Tape, found: Collected) -> None:
    """What needs saying once."""
    shapes = dict(model.named_parameters())
    found.names = list(tape.names)
    found.shapes = [tuple(shapes[name].shape) for name in found.names]
    told = tape.explain()
    found.slow, found.ambiguous = told.slow, told.ambiguous


def _check(model: nn.Module, loss_fn: LossFn, batch: Any, plan: Plan, found: Collected) -> None:
    """The self-check and the isolation probe, on a few samples of the first batch."""
    dim, n = plan.options.get("dim", 0), _size(batch, plan)
    if n is None:
        found.unverified = "the samples of a batch of this kind cannot be exchanged"
        return
    if n < 2:
        found.unverified = "the first batch has one sample, and isolation needs two"
        return
    few = batch
    told = {"constants", *(k for k in ("n", "sample_ids") if not _pick(plan.options.get(k)))}
    if n > PROBED and not told & set(plan.options):
        few = take(batch, torch.arange(PROBED), n, dim)
    found.verification = verify(model, loss_fn, few, **plan.options)
    found.unverified = ""


def _noise_part(norms: Tensor, projections: Tensor) -> Tensor:
    """(n, meanᵢ‖gᵢ‖², ‖meanᵢ gᵢ‖²) of the finite samples, the last from projections."""
    fine = torch.isfinite(norms)
    n = int(fine.sum())
    if not n:
        return torch.zeros(1, 3, dtype=torch.float64)
    mean = projections[fine].double().mean(0).square().sum()
    size = norms[fine].double().square().mean()
    return torch.stack([torch.tensor(float(n), dtype=torch.float64), size, mean]).unsqueeze(0)


def _pick(option: Any) -> bool:
    return callable(option) or isinstance(option, str)


def _size(batch: Any, plan: Plan) -> int | None:
    """How many samples a batch has; None for objects whose inside only the model knows."""
    try:
        told = resolved(plan.options, batch).get("n")
        if told is not None:
            return int(told)
        return batch_size(batch, plan.options.get("dim", 0))
    except UsageError:
        return None


def _length(batches: Iterable[Any], limit: int | None) -> int | None:
    try:
        total = len(batches)  # type: ignore[arg-type]
    except TypeError:
        return limit
    return total if limit is None else min(total, limit)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers and random generators end as they were: looking must not change the model."""
    before = Buffers(model)
    devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        before.restore()
