"""The plan: every public constant of a private training, fixed before the data are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import UsageError
from ..validation import number, shown, whole
from . import accounting, banded, constants, statement, truncation


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The public constants of a private training; made by :func:`plan`.

    Nothing in it is read off the data. ``print(plan)`` is the statement to publish.

    Attributes:
        noise_multiplier: σ, the standard deviation of the noise in units of the sensitivity.
        sample_rate: q, the probability with which a record is in a batch.
        steps: T, the number of updates.
        max_norm: C, the bound on what one record contributes to a sum.
        delta: δ of the guarantee.
        size: The public number of records (of users if ``unit="user"``), or None.
        batch_size: The expected number of records in a batch, q · size, or None.
        divisor: The constant that divides a noisy sum; None is enough for accounting only.
        unit: What a record is: ``"sample"`` or ``"user"``.
        clipping: ``"flat"``, ``"automatic"`` or ``"per_layer"``.
        cap: The largest number of records in a batch, or None (Poisson sampling as it is).
        bands: b of banded matrix factorization; 1 is independent noise (DP-SGD).
        target_epsilon: The ε that was asked for, or None if the noise multiplier was.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    max_norm: float
    delta: float
    size: int | None = None
    batch_size: float | None = None
    divisor: float | None = None
    unit: str = "sample"
    clipping: str = "flat"
    cap: int | None = None
    bands: int = 1
    target_epsilon: float | None = None

    def __post_init__(self) -> None:
        for name, value in constants.checked(asdict(self)).items():
            object.__setattr__(self, name, value)

    @property
    def relation(self) -> str:
        """``"zero-out"``, or ``"add-or-remove"`` if the plan holds no size."""
        return "zero-out" if self.size is not None else "add-or-remove"

    @property
    def column_norm(self) -> float:
        """The largest column norm of the noise's strategy matrix; 1 for one band."""
        return banded.column_norm(self.bands)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the white noise drawn once a step: σ · C · column_norm."""
        return self.noise_multiplier * self.max_norm * self.column_norm

    @property
    def group_rate(self) -> float:
        """The probability with which a record is drawn in a step of its group: b · q."""
        return self.mechanism().rate

    def epsilon(self, steps: int | None = None) -> float:
        """ε at the plan's δ after ``steps`` updates (after all of them by default).

        >>> from persample import private
        >>> plan = private.plan(
        ...     noise_multiplier=1.0, delta=1e-5, size=1000, batch_size=100, steps=20
        ... )
        >>> plan.epsilon(0) == 0 < plan.epsilon(10) < plan.epsilon()
        True
        """
        done = self.steps if steps is None else whole(steps, "steps", least=0)
        return accounting.epsilon(self.mechanism(), steps=done, delta=self.delta)

    def event(self, steps: int | None = None) -> Any:
        """The dp-accounting event of ``steps`` updates, to be composed with other releases."""
        done = self.steps if steps is None else whole(steps, "steps", least=0)
        return accounting.event(self.mechanism(), steps=done)

    def statement(self, steps: int | None = None) -> str:
        """The statement to publish after ``steps`` updates (after all of them by default)."""
        done = self.steps if steps is None else whole(steps, "steps", least=0)
        return statement.text(self, steps=done)

    def mechanism(self) -> accounting.Mechanism:
        """What the accountant has to know of one step."""
        return accounting.Mechanism(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            size=self.size,
            cap=self.cap,
            bands=self.bands,
        )

    def fingerprint(self) -> str:
        """A digest of all public constants, the same on every machine: for checkpoints."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The constants by name; JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan whose :meth:`to_dict` this is; its constants are checked again."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != names:
            raise UsageError(
                f"these are not the constants of a plan: {shown(values)}",
                fix="Plan.from_dict takes what plan.to_dict() returned",
            )
        return cls(**values)

    def __str__(self) -> str:
        return self.statement()


def plan(
    *,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    size: int | None = None,
    batch_size: int | None = None,
    sample_rate: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    max_norm: float = 1.0,
    divisor: float | None = None,
    unit: str = "sample",
    clipping: str = "flat",
    cap: int | str | None = None,
    bands: int = 1,
) -> Plan:
    """Fix the constants of a private training, and find the noise that a target ε needs.

    A step releases (Σᵢ clip(gᵢ, C) + N(0, σ²C²)) / divisor over a Poisson sample of rate
    q = batch_size / size; T = ⌈epochs · size / batch_size⌉ steps are (ε, δ)-private.

    >>> from persample import private
    >>> plan = private.plan(
    ...     epsilon=8, delta=1e-5, size=2000, batch_size=200, epochs=2, max_norm=1.0
    ... )
    >>> plan.steps, plan.sample_rate, plan.divisor
    (20, 0.1, 200.0)
    >>> 7.92 <= plan.epsilon() <= 8
    True

    Args:
        delta: δ, below 1 / size.
        epsilon: The target ε: σ is the smallest (within 1 % of ε) that keeps to it.
        noise_multiplier: σ, instead of a target.
        size: The public number of records; of users if ``unit="user"``.
        batch_size: The expected number of records in a batch.
        sample_rate: q, instead of batch_size: enough for accounting; training also needs
            size or divisor.
        epochs: Expected passes over the data.
        steps: T, instead of epochs.
        max_norm: C, the bound on what one record contributes to a sum.
        divisor: The constant that divides a noisy sum; the expected batch size by default.
        unit: What is protected: one ``"sample"``, or all samples of one ``"user"``.
        clipping: ``"flat"``, ``"automatic"``, or ``"per_layer"`` (√ΣC_l² = C).
        cap: The largest number of records in a batch (a uniform subset of a larger draw is
            kept); ``"auto"`` is six standard deviations above the mean.
        bands: b: noise correlated over b steps (banded matrix factorization); 1 is DP-SGD.
    """
    accounting.version()  # a training whose ε nobody can compute is better not begun
    size = None if size is None else whole(size, "size", least=1)
    rate, batch = constants.sampling(size, batch_size, sample_rate)
    noise = constants.noise(epsilon, noise_multiplier)
    values: dict[str, Any] = {
        "noise_multiplier": noise if noise is not None else 1.0,
        "sample_rate": rate,
        "steps": constants.updates(epochs, steps, rate=rate, size=size, batch_size=batch),
        "max_norm": max_norm,
        "delta": delta,
        "size": size,
        "batch_size": batch,
        "divisor": batch if divisor is None else divisor,
        "unit": unit,
        "clipping": clipping,
        "cap": truncation.default_cap(size, rate) if cap == "auto" else cap,
        "bands": bands,
        "target_epsilon": epsilon,
    }
    found = Plan(**values)  # with any noise: every other constant is checked before the search
    constants.warn_of_delta(found.delta, size, unit)
    return found if noise is not None else _calibrated(found)


def _calibrated(found: Plan) -> Plan:
    """The plan with the noise that its target ε needs."""
    target = number(found.target_epsilon, "epsilon")
    noise = accounting.calibrate(
        found.mechanism(), steps=found.steps, delta=found.delta, target=target
    )
    return Plan(**{**found.to_dict(), "noise_multiplier": noise})
