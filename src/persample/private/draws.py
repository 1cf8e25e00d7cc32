"""Who is in which batch, and in which of its micro-batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .keys import seed
from .observer import Observer
from .parallel import Processes
from .plan import Plan
from .sampling import Sampler
from .users import Part, Samples, Units, Users


class Draws:
    """The draws of a training, all of them functions of one secret.

    Args:
        plan: The public constants.
        secret: The key.
        count: The number of samples in the data.
        micro_batch: The largest number of rows in a part.
        users: One user per sample, or None.
        per_user: The largest number of samples of one user in a step.
        pad: Whether parts are filled up to ``micro_batch`` rows.
    """

    def __init__(
        self,
        plan: Plan,
        secret: bytes,
        *,
        count: int,
        micro_batch: int,
        users: Any,
        per_user: int | None,
        pad: bool,
    ) -> None:
        self.units: Units = Samples(plan.size or count, micro_batch)
        if users is not None:
            self.units = Users(
                users, count=count, size=plan.size, micro_batch=micro_batch, per_user=per_user,
                secret=secret,
            )  # fmt: skip
        self.sampler = Sampler(
            secret=secret, size=self.units.size, rate=plan.sample_rate, cap=plan.cap,
            bands=plan.bands,
        )  # fmt: skip
        self._rows, self._pad = micro_batch, pad
        self._latest: tuple[int, Tensor] | None = None  # whoever loads a batch draws it, too

    def parts(self, step: int, processes: Processes, observer: Observer) -> list[Part]:
        """The micro-batches of a step that are this process's."""
        if self._latest is None or self._latest[0] != step:
            self._latest = step, self.sampler.drawn(step)
        drawn = observer.drawn(step, self._latest[1])
        found = processes.mine(self.units.parts(step, drawn))
        return [part.padded(self._rows) for part in found] if self._pad else found

    def job(self, step: int, part: Part) -> tuple[Tensor, int]:
        """What a loader has to know of a part: its rows, and a seed of its own."""
        return part.rows, seed(self.sampler.secret, "loading", step, part.number)
