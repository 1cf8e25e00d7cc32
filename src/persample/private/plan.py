"""The plan: every public constant of a private training, fixed before the data are read."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError, warn_caller
from ..validation import number, shown, whole
from . import accounting, statement, truncation
from .constants import Constants, fraction, positive


class PrivacyWarning(UserWarning):
    """A plan is consistent, but its guarantee means little."""


@dataclass(frozen=True, kw_only=True)
class Plan(Constants):
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

    def statement(self, steps: int | None = None) -> str:
        """The statement to publish after ``steps`` updates (after all of them by default)."""
        done = self.steps if steps is None else whole(steps, "steps", least=0)
        return statement.text(self, steps=done)

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
    rate, batch = _sampling(size, batch_size, sample_rate)
    noise = _noise(epsilon, noise_multiplier)
    values: dict[str, Any] = {
        "noise_multiplier": noise if noise is not None else 1.0,
        "sample_rate": rate,
        "steps": _updates(epochs, steps, rate=rate, size=size, batch_size=batch),
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
    _warn_of_delta(found.delta, size, unit)
    return found if noise is not None else _calibrated(found)


def _calibrated(found: Plan) -> Plan:
    """The plan with the noise that its target ε needs."""
    target = number(found.target_epsilon, "epsilon")
    noise = accounting.calibrate(
        found.mechanism(), steps=found.steps, delta=found.delta, target=target
    )
    return Plan(**{**found.to_dict(), "noise_multiplier": noise})


def _sampling(size: int | None, batch_size: Any, sample_rate: Any) -> tuple[float, float | None]:
    """The sampling rate and, where the size is known, the expected batch size."""
    if (batch_size is None) is (sample_rate is None):
        given = "neither" if batch_size is None else "both"
        raise UsageError(
            f"a plan takes batch_size or sample_rate, got {given}", fix="batch_size=512 with size="
        )
    if batch_size is None:
        rate = fraction(sample_rate, "sample_rate", closed=True, fix="sample_rate=0.01")
        return rate, None if size is None else rate * size
    batch = whole(batch_size, "batch_size", least=1)
    if size is None:
        raise UsageError(
            "batch_size alone gives no sampling rate",
            fix="add size=, the public number of records, or pass sample_rate=",
        )
    if batch > size:
        raise UsageError(
            f"batch_size {batch} is more than size {size}",
            why="the sampling rate batch_size / size is a probability",
            fix=f"batch_size={size} at most",
        )
    return batch / size, float(batch)


def _updates(
    epochs: Any, steps: Any, *, rate: float, size: int | None, batch_size: float | None
) -> int:
    """The number of updates: ⌈epochs · size / batch_size⌉, or as given."""
    if (epochs is None) is (steps is None):
        given = "neither" if epochs is None else "both"
        raise UsageError(f"a plan takes epochs or steps, got {given}", fix="epochs=10")
    if epochs is None:
        return whole(steps, "steps", least=1)
    passes = positive(epochs, "epochs", fix="epochs=10")
    exact = passes / rate if size is None or batch_size is None else passes * size / batch_size
    if exact > sys.maxsize:
        raise UsageError(f"epochs={shown(epochs)} are too many updates", fix="epochs=10")
    return math.ceil(round(exact, 6))  # 7 / 0.07 is 100, not 101


def _noise(epsilon: Any, noise_multiplier: Any) -> float | None:
    """The noise multiplier if it was given; None if a target ε was."""
    if (epsilon is None) is (noise_multiplier is None):
        given = "neither" if epsilon is None else "both"
        raise UsageError(
            f"a plan takes epsilon or noise_multiplier, got {given}",
            why="one follows from the other",
            fix="epsilon=8.0, and the noise is found; or noise_multiplier=1.0",
        )
    if noise_multiplier is None:
        positive(epsilon, "epsilon", fix="epsilon=8.0")
        return None
    return positive(noise_multiplier, "noise_multiplier", fix="noise_multiplier=1.0")


def _warn_of_delta(delta: float, size: int | None, unit: str) -> None:
    """Warn of a δ at which releasing one whole record would count as private."""
    if size is not None and delta >= 1 / size:
        warn_caller(
            f"delta={delta:g} is not below 1 / size = {1 / size:.3g}: publishing one {unit} at "
            "random would count as private; choose delta well below 1 / size",
            PrivacyWarning,
        )
