"""The private training: draws batches, adds up clipped gradients, adds noise, steps, counts."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..api import record
from ..errors import ExtractedNumberWarning, NonFiniteWarning, PersampleError, UsageError
from ..tape.tape import Tape
from ..validation import expect_loss_fn, whole
from . import checks, keys, short_form, state, statement
from .batch import Batch
from .draws import Draws
from .ledger import Ledger
from .loading import Collate, Source, placed
from .noise import Noise
from .observer import Observer
from .parallel import Processes, as_gradient, checksum
from .plan import Plan
from .rules import rule_of, weighted
from .sampling import Sampler
from .users import Part, Units

LossFn = Callable[[nn.Module, Any], Tensor]


class Training:
    """Train a model with differential privacy, by the constants of a plan.

    A step is θ ← optimizer(θ, (Σᵢ clip(gᵢ, C) + N(0, σ²C²)) / divisor), where i runs over a Poisson
    batch that is recorded in micro-batches. ``.grad`` belongs to the training.

    >>> import torch
    >>> from persample import private
    >>> model, x, y = torch.nn.Linear(3, 1), torch.randn(20, 3), torch.randn(20, 1)
    >>> plan = private.plan(noise_multiplier=1.0, delta=1e-3, size=20, batch_size=5, steps=2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> training = private.Training(model, optimizer, (x, y), plan)
    >>> for parts in training.batches():
    ...     for x, y in parts:
    ...         with training.record() as tape:
    ...             tape.backward((model(x) - y).square().sum(1))
    ...     training.step()
    >>> training.steps
    2

    Args:
        model: Any module; what its samples' gradients cannot be proven of is refused.
        optimizer: Any of torch.optim's that needs no closure, of this model's parameters.
        data: A map-style Dataset, a tensor, or a tuple or dictionary of tensors.
        plan: The public constants, from :func:`persample.private.plan`.
        loss_fn: ``loss_fn(model, batch)`` returns one loss per sample; for the short form
            ``for step in training``.
        micro_batch: How many samples are recorded at once. It changes memory, not the result.
        users: One user per sample, where the plan protects users.
        collate: Makes a batch of a list of samples.
        num_workers: Processes that load micro-batches ahead.
        scheduler: Stepped once a step.
        noise_generator: For tests: decides the noise, which else comes from the operating system.
        sample_generator: For tests: decides the batches.
        per_user: The largest number of samples of one user in a step, drawn uniformly.
        pad: Fill every micro-batch up to ``micro_batch`` rows with some that count for nothing, so
            that all have one shape.
        unsafe: Also log and warn of what is not private: batch sizes, non-finite samples.
        verify: Check persample on synthetic rows before the first step of the short form.
        options: Options of :func:`persample.record` for the short form.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any,
        plan: Plan,
        loss_fn: LossFn | None = None,
        micro_batch: int = 64,
        users: Any = None,
        collate: Collate | None = None,
        num_workers: int = 0,
        scheduler: Any = None,
        noise_generator: torch.Generator | None = None,
        sample_generator: torch.Generator | None = None,
        *,
        per_user: int | None = None,
        pad: bool = False,
        unsafe: bool = False,
        verify: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = Source(data, collate=collate, num_workers=num_workers)
        checks.expect_plan(plan, len(self.source), users)
        checks.expect_optimizer(optimizer, model, checks.expect_model(model))
        checks.expect_scheduler(scheduler, optimizer)
        checks.expect_options(options or {}, users=users is not None)
        if loss_fn is not None:
            expect_loss_fn(loss_fn)
        self.model, self.optimizer, self.scheduler, self.plan = model, optimizer, scheduler, plan
        self.loss_fn, self.unsafe, self.options = loss_fn, unsafe, dict(options or {})
        self.verified = "" if verify else "not asked for"
        self.processes, self.observer, self.ledger = Processes(model), Observer(), Ledger()
        self.log: list[dict[str, Any]] = []
        self._drawing: dict[str, Any] = {
            "count": len(self.source),
            "micro_batch": whole(micro_batch, "micro_batch", least=1, fix="micro_batch=64"),
            "users": users,
            "per_user": per_user,
            "pad": pad,
        }
        self.set_secrets(
            self.processes.share(_secret(sample_generator, "sample_generator")),
            self.processes.share(_secret(noise_generator, "noise_generator")),
        )
        self.optimizer_configuration = state.configuration(optimizer, model, scheduler)
        self._batch: Batch | None = None
        self._generators: dict[str, Any] = {}
        self._expect_agreement()

    def set_secrets(self, sample: bytes, noise: bytes) -> None:
        """Key the draws and the noise."""
        self.draws = Draws(self.plan, sample, **self._drawing)
        self.noise = Noise(secret=noise, std=self.plan.noise_std, bands=self.plan.bands)

    @property
    def sampler(self) -> Sampler:
        """The coins."""
        return self.draws.sampler

    @property
    def units(self) -> Units:
        """Samples or users."""
        return self.draws.units

    def _expect_agreement(self) -> None:
        if self.processes.count > 1:
            self.processes.expect_agreement(
                {
                    "plan": self.plan.fingerprint(),
                    "data": state.data_fingerprint(self),
                    "micro_batch": str(self._drawing["micro_batch"]),
                    "optimizer": self.optimizer_configuration,
                    "parameters": checksum(self.trainable()),
                }
            )

    # ------------------------------------------------------------------ the loop

    @property
    def steps(self) -> int:
        """How many steps were done (or counted) so far."""
        return self.ledger.steps

    def batches(self) -> Iterator[Batch]:
        """The batches of the steps that are left, each an iterable of micro-batches.

        A batch may be empty; call :meth:`step` all the same. Where a loop was left before
        ``step()``, the next one begins with the same batch.
        """
        due, draws = -1, self.draws
        while self.steps < self.plan.steps:
            step = self.steps
            parameters = checks.expect_model(self.model)
            checks.expect_optimizer(self.optimizer, self.model, parameters)
            if step != due or draws is not self.draws:  # the first, or a checkpoint was loaded
                draws, loaded = self.draws, self.source.each(self._jobs(step))
            for parameter in parameters.values():
                parameter.grad = None
            self._generators = state.generators()
            self._batch = batch = Batch(step, self.parts(step), loaded, parameters)
            yield batch
            due = step + 1 if batch.finished else -1
            if self._batch is not None:
                raise UsageError(
                    "the next batch was asked for before training.step()",
                    why="every batch that is drawn is one step of the plan, empty ones too",
                    fix="call training.step() after the micro-batches of each batch",
                )

    def _jobs(self, start: int) -> Iterator[tuple[Tensor, int]]:
        for step in range(start, self.plan.steps):
            for part in self.parts(step):
                yield self.draws.job(step, part)

    def parts(self, step: int) -> list[Part]:
        """The micro-batches of a step that are this process's."""
        return self.draws.parts(step, self.processes, self.observer)

    @contextlib.contextmanager
    def record(self, **options: Any) -> Iterator[Tape]:
        """Record the forward and backward of the current micro-batch.

        Leaving the block adds its clipped sum to the batch's. Takes the options of
        :func:`persample.record`.
        """
        checks.expect_options(options, users=self.plan.unit == "user")
        batch = self._expect_batch("record")
        part = batch.current()
        self.observer.recording(part)
        kept = checks.Written(self.model)
        known: dict[str, Any] = {"n": part.n}
        if part.ids is not None:
            known["sample_ids"] = part.ids
        recording = record(self.model, **{**known, **options})
        with self.processes.apart(), recording as tape:
            for tensor, axis in batch.tensors(options):
                tape.mark(tensor, dim=axis, ids=part.ids)
            try:
                yield tape
            except PersampleError as error:
                raise checks.refused(error) from error
        kept.expect_none()
        if tape.n != part.n:
            raise UsageError(
                "the recording does not have the samples of the micro-batch",
                fix="run the model on the micro-batch that was read last, and on nothing else",
            )
        batch.add(self.clipped(tape, part))
        tape.close()

    def clipped(self, tape: Tape, part: Part) -> dict[str, Tensor]:
        """Σᵢ clip(gᵢ, C) over one micro-batch."""
        rule, weights = rule_of(self.plan.clipping), self.weights(part)
        if weights is not None:
            rule = weighted(self.plan.clipping, weights, tape.names)
        with warnings.catch_warnings():
            if not self.unsafe:  # whether a sample is finite is not for everybody to know
                warnings.simplefilter("ignore", NonFiniteWarning)
            warnings.simplefilter("error", ExtractedNumberWarning)
            try:
                return tape.clipped_sum(self.plan.max_norm, rule=rule)
            except ExtractedNumberWarning as taken:
                raise checks.number_taken(str(taken)) from None

    def weights(self, part: Part) -> Tensor | None:
        """What each sample of a recording counts; None for 1 each."""
        found = [w for w in (part.weights(), self.observer.weights(part)) if w is not None]
        return math.prod(found[1:], start=found[0]) if found else None

    def step(self, closure: None = None) -> None:
        """Add noise to the sums, divide by the constant, update the model, and count.

        The step is counted before its update can be seen: where one fails half-way, it is spent.
        """
        if closure is not None:
            raise UsageError(
                "training.step() takes no closure",
                why="a closure that is run again would release a second gradient",
                fix="run the micro-batches before, then call training.step()",
            )
        batch = self._expect_batch("step")
        batch.expect_complete()
        self._batch, batch.finished = None, True
        sums = batch.sums.total()
        self.processes.add_up(sums.values())
        self.observer.summed(batch.step, sums)
        self.ledger.count()
        grads = self.observer.released(batch.step, self.released(batch, sums))
        self._write(grads, batch.parameters)
        self.optimizer.step()
        self._log(batch)
        if self.scheduler is not None:
            self.scheduler.step()

    @torch.no_grad()
    def _write(self, grads: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Make them all that the optimizer finds: a frozen parameter may hold a gradient, too."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for name, parameter in parameters.items():
            if parameter.requires_grad:  # it may be frozen since
                parameter.grad = as_gradient(grads[name], parameter)

    def released(self, batch: Batch, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """(sum + noise) / divisor: all that leaves a step."""
        assert self.plan.divisor is not None
        self.noise.add(batch.step, sums, self.plan.divisor)
        return sums

    def _log(self, batch: Batch) -> None:
        entry: dict[str, Any] = {
            "step": self.steps,
            "lr": [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group],
        }
        if self.unsafe:
            entry["drawn"] = sum(len(part.units) for part in batch.parts if not part.idle)
        self.log.append(entry)

    def _expect_batch(self, what: str) -> Batch:
        if self._batch is None:
            done = self.steps >= self.plan.steps
            raise UsageError(
                f"training.{what}() without a batch",
                why="all steps of the plan are done" if done else "no batch was drawn",
                fix="for parts in training.batches(): ...",
            )
        return self._batch

    def __iter__(self) -> Iterator[int]:
        """Do the steps that are left; yields the number of steps done, after each update."""
        return short_form.steps(self)

    def load(self, rows: Tensor) -> Any:
        """Rows of the data as a batch on the model's device."""
        return placed(self.source.load(rows), next(self.model.parameters()).device)

    def trainable(self) -> dict[str, Tensor]:
        """The parameters that are trained, each once."""
        return checks.trainable(self.model)

    # ------------------------------------------------------------------ what was spent, and state

    def epsilon(self) -> float:
        """ε spent so far, at the plan's δ."""
        return self.plan.epsilon(self.ledger.spent)

    def statement(self) -> str:
        """The statement to publish, of the steps that were done so far."""
        return statement.text(self.plan, steps=self.ledger.spent)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bit-for-bit resume needs, as plain dictionaries, tensors and numbers.

        **It is as secret as the data**: it holds the keys of the noise and of the batches.
        """
        found = state.gather(self)
        if self._batch is not None:  # it will be drawn again: from the numbers that it began with
            found["generators"] = state.snapshot(self._generators)
        return found

    def load_state_dict(self, found: Mapping[str, Any], *, fork: bool = False) -> None:
        """Go on from a checkpoint of the same plan, data and optimizer.

        Args:
            found: What :meth:`state_dict` returned.
            fork: Draw new secrets, and count the other branch to the end of the plan. Two runs
                that go on from one checkpoint with one noise would cancel it.
        """
        self._batch = None
        state.restore(self, found, fork=fork)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`state_dict` to a file that only its owner may read.

        A save that is interrupted leaves the file that was there before.
        """
        state.save(self.state_dict(), path)


def _secret(generator: torch.Generator | None, what: str) -> bytes:
    return keys.fresh() if generator is None else keys.from_generator(generator, what)
