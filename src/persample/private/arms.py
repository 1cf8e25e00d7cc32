"""The runs that replay compares: each a whole training, held in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import Batch
from .contribution import length
from .noise import Noise
from .observer import Observer
from .sampling import Sampler
from .short_form import record_losses
from .training import Training
from .users import Part

Named = Mapping[str, Tensor]


class Arm(Observer):
    """One training in which a unit is always drawn, or never.

    Args:
        training: The training; this object becomes its observer.
        unit: The record (or user) in question.
        present: Whether it is in every batch, or in none.
        masked: Whether its contribution has weight zero.
        still: Whether the model is in eval mode: no dropout.
    """

    def __init__(
        self,
        training: Training,
        unit: int,
        *,
        present: bool = True,
        masked: bool = False,
        still: bool = False,
    ) -> None:
        self.training, self.unit = training, unit
        self._present, self._masked = present, masked
        self._draws = training.noise.draws
        self._batch: Batch | None = None
        self._sums: dict[str, Tensor] = {}
        self._forced: dict[str, Tensor] | None = None
        self.own: dict[str, Tensor] = {}  # what this arm would have released itself
        plan, sampler = training.plan, training.sampler
        self._reference = Sampler(
            secret=sampler.secret, size=training.units.size, rate=plan.sample_rate, cap=plan.cap,
            bands=plan.bands,
        )  # fmt: skip
        self._noise = Noise(secret=training.noise.secret, std=plan.noise_std, bands=plan.bands)
        training.observer = self
        training.verified = "not asked for"
        if still:
            training.model.eval()
        self.batches: Iterator[Batch] = training.batches()

    def follow(self, leader: Arm) -> None:
        """Begin with another arm's model, optimizer and secrets."""
        mine, theirs = self.training, leader.training
        mine.model.load_state_dict(theirs.model.state_dict())
        mine.optimizer.load_state_dict(theirs.optimizer.state_dict())
        if mine.scheduler is not None and theirs.scheduler is not None:
            mine.scheduler.load_state_dict(theirs.scheduler.state_dict())
        mine.set_secrets(theirs.sampler.secret, theirs.noise.secret)
        self._reference, self._noise = (
            leader._reference,
            Noise(secret=theirs.noise.secret, std=mine.plan.noise_std, bands=mine.plan.bands),
        )

    # ------------------------------------------------------------------ one step

    def run(self) -> None:
        """Record every micro-batch of the next step."""
        self._batch = next(self.batches)
        for batch, part in zip(self._batch, self._batch.parts, strict=True):
            record_losses(self.training, batch, part)

    def sums(self) -> dict[str, Tensor]:
        """S, before noise."""
        assert self._batch is not None
        return {name: value.clone() for name, value in self._batch.sums.total().items()}

    def finish(self, leader: Arm) -> None:
        """Take the step, with the leader's release."""
        self._forced = None if leader is self else leader.own
        self.training.step()

    def noise(self, step: int, like: Named) -> dict[str, Tensor]:
        """The noise that the plan wants in a step."""
        made = {name: torch.zeros_like(value) for name, value in like.items()}
        self._noise.add(step, made)
        return made

    @property
    def drawn_now(self) -> int:
        """How many units are in the current batch."""
        assert self._batch is not None
        return sum(len(part.units) for part in self._batch.parts)

    def units_now(self) -> list[int]:
        """Which units are in the current batch."""
        assert self._batch is not None
        return [unit for part in self._batch.parts for unit in part.units.tolist()]

    def expected_units(self, step: int) -> list[int]:
        """Which should be, by an independent sampler of the plan's constants."""
        drawn = self.drawn(step, self._reference.drawn(step))
        return [u for p in self.training.units.parts(step, drawn) for u in p.units.tolist()]

    def noise_draws(self) -> int:
        """How often noise was drawn since the last call."""
        now = self.training.noise.draws
        found, self._draws = now - self._draws, now
        return found

    # ------------------------------------------------------------------ as an observer

    def drawn(self, step: int, units: Tensor) -> Tensor:
        """The batch with the unit, or without."""
        rest = units[units != self.unit]
        if not self._present:
            return rest
        return torch.cat([rest, torch.tensor([self.unit])]).sort().values

    def recording(self, part: Part) -> None:
        """The model draws the same numbers in every arm."""
        assert self._batch is not None
        torch.manual_seed(1_000_003 * self._batch.step + part.number)

    def weights(self, part: Part) -> Tensor | None:
        """Zero for the unit if it is masked."""
        if not self._masked:
            return None
        counted = torch.ones(part.n, dtype=torch.float64)
        counted[: len(part.units)][part.units == self.unit] = 0
        return counted

    def released(self, step: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """The leader's release instead of its own."""
        self.own = {name: value.clone() for name, value in grads.items()}
        return self.own if self._forced is None else self._forced


def others(training: Training, data: Any, unit: int) -> Any:
    """The data with another record's content in the places of a unit's."""
    owners = getattr(training.units, "owners", None)
    mine = [unit] if owners is None else (owners == unit).nonzero().flatten().tolist()
    rest = [row for row in range(len(training.source)) if row not in set(mine)]
    places = {row: rest[row % len(rest)] for row in mine} if rest else {}
    if training.source.columns is None:
        return _Replaced(data if not hasattr(data, "dataset") else data.dataset, places)

    def changed(column: Tensor) -> Tensor:
        made = column.clone()
        for row, other in places.items():
            made[row] = column[other]
        return made

    if isinstance(data, Tensor):
        return changed(data)
    if isinstance(training.source.data, Mapping):
        return {name: changed(column) for name, column in training.source.data.items()}
    return tuple(changed(column) for column in training.source.columns)


class _Replaced(torch.utils.data.Dataset[Any]):
    def __init__(self, data: Any, places: Mapping[int, int]) -> None:
        self._data, self._places = data, dict(places)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> Any:
        return self._data[self._places.get(row, row)]


def expect_public(arms: Sequence[Arm], step: int, sums: Sequence[Named]) -> Iterator[str]:
    """What of the public side of a step is not what the plan says, or differs between arms."""
    first = arms[0].training
    for arm, mine in zip(arms, sums, strict=True):
        if arm.units_now() != arm.expected_units(step):
            yield "the batch is not the Poisson sample of the plan"
        draws = arm.noise_draws()
        if draws != 1:
            yield f"noise was drawn {draws} times in a step"
        wrong = _wrong_release(arm, mine, arm.noise(step, mine))
        if wrong is not None:
            yield f"{wrong}: what is released is not (sum + noise) / divisor"
    for arm in arms[1:]:
        other = arm.training
        pairs = zip(first.model.parameters(), other.model.parameters(), strict=True)
        if not all(torch.equal(p, q) for p, q in pairs):
            yield "equal releases lead to different parameters"
        if other.log[-1].get("lr") != first.log[-1].get("lr"):
            yield "learning rates differ"
        if other.ledger != first.ledger:
            yield "ledgers differ"


def _wrong_release(arm: Arm, sums: Named, noise: Named) -> str | None:
    """The first parameter whose release does not follow from sum, noise and divisor."""
    divisor = arm.training.plan.divisor
    assert divisor is not None
    for name, value in sums.items():
        expected = (value + noise[name]) / divisor
        error = length({name: arm.own[name] - expected})
        if not error <= 16 * torch.finfo(expected.dtype).eps * length({name: expected}):
            return name
    return None
