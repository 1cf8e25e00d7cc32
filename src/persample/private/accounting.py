"""All that talks to dp-accounting, which is imported when a number is first needed."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from ..errors import UsageError
from . import search

FINE, COARSE = 1e-4, 1e-3  # discretisation of the answer, and of the search for a noise multiplier
CAPPED = 5e-4  # of an answer with a cap: its losses spread over four times the range
_ONE, _ALL = 1e5, 1e7  # values of a distribution of one step (10 µs each) and of all of them
_NARROW = 20.0  # the range of losses of one step up to which it may have more (σ ≥ 0.54)
_HOPELESS = 1e7  # a larger ε is reported as infinity
_LARGEST_TARGET = 1e4
_INSTALL = "pip install persample[private]"


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """What the accountant has to know of one step of training."""

    noise_multiplier: float
    sample_rate: float
    size: int | None = None
    cap: int | None = None
    bands: int = 1

    @property
    def rate(self) -> float:
        """The probability with which a record is in a batch of its group: b · q."""
        return min(1.0, self.bands * self.sample_rate)

    def count(self, steps: int) -> int:
        """How often one record can take part: in every b-th step."""
        return math.ceil(steps / self.bands)


def version() -> str:
    """The version of dp-accounting that is installed; others than 0.6 are refused."""
    try:
        found = importlib.metadata.version("dp-accounting")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "private training needs dp-accounting, which is not installed",
            why="it computes epsilon and the noise for it",
            fix=_INSTALL,
        ) from None
    if found.split(".")[:2] != ["0", "6"]:
        raise UsageError(
            f"private training needs dp-accounting 0.6, found {found}",
            why="its answers were compared with closed forms and other accountants in 0.6 only",
            fix=_INSTALL,
        )
    return found


def event(mechanism: Mechanism, *, steps: int) -> Any:
    """The dp-accounting event of so many steps, for a ledger that holds other releases, too.

    One band: T × PoissonSampled(q, Gaussian(σ)). b bands: ⌈T/b⌉ × PoissonSampled(b·q,
    Gaussian(σ)), because a record can take part in one step of b only, at b times the rate.
    """
    library = _library()
    if mechanism.cap is not None:
        one = library.TruncatedSubsampledGaussianDpEvent(
            dataset_size=mechanism.size,
            sampling_probability=mechanism.sample_rate,
            truncated_batch_size=mechanism.cap,
            noise_multiplier=mechanism.noise_multiplier,
        )
    else:
        noise = library.GaussianDpEvent(mechanism.noise_multiplier)
        one = library.PoissonSampledDpEvent(mechanism.rate, noise)
    return library.SelfComposedDpEvent(one, mechanism.count(steps))


def described(mechanism: Mechanism) -> str:
    """The event of one step in dp-accounting's words."""
    noise = f"{mechanism.noise_multiplier:.6g}"
    if mechanism.cap is not None:
        return (
            f"TruncatedSubsampledGaussianDpEvent({mechanism.size}, {mechanism.sample_rate:.6g}, "
            f"{mechanism.cap}, {noise})"
        )
    return f"PoissonSampledDpEvent({mechanism.rate:.6g}, GaussianDpEvent({noise}))"


def epsilon(mechanism: Mechanism, *, steps: int, delta: float) -> float:
    """ε at δ after so many steps: an upper bound, up to rounding (about 1e-7 of ε).

    The privacy loss is discretised in steps of :func:`interval`, upwards. Infinity where that
    cannot tell: ε above 1e7, or δ below about 1e-14.
    """
    if not steps:
        return 0.0
    width = interval(mechanism, steps=steps, least=FINE if mechanism.cap is None else CAPPED)
    return composed(mechanism, steps=steps, delta=delta, width=width)


def interval(mechanism: Mechanism, *, steps: int, least: float) -> float:
    """``least``, or more where a distribution would have too many values (a small σ)."""
    sensitivity = 1 if mechanism.cap is None else 2  # a capped record pushes another one out
    count, scale = mechanism.count(steps), sensitivity / mechanism.noise_multiplier
    if count * scale * scale / 2 > _HOPELESS:
        return math.inf
    one = _width(scale)
    # the loss of T sampled steps is about that of one Gaussian release of this scale
    sampled = mechanism.rate * math.sqrt(count * math.expm1(min(scale * scale, 100.0)))
    both = min(_width(scale * math.sqrt(count)), _width(sampled) + one)
    return max(least, min(one / _ONE, FINE * (one / _NARROW) ** 2), both / _ALL)


def _width(scale: float) -> float:
    """Mean and ten standard deviations of the privacy loss of a Gaussian release."""
    return scale * scale / 2 + 10 * scale


@lru_cache(maxsize=512)
def composed(mechanism: Mechanism, *, steps: int, delta: float, width: float) -> float:
    """ε by composing privacy loss distributions that are discretised in steps of ``width``."""
    if math.isinf(width):
        return math.inf
    library = _library()
    relations = library.NeighboringRelation
    unsized = mechanism.size is None
    accountant = library.pld.PLDAccountant(
        relations.ADD_OR_REMOVE_ONE if unsized else relations.REPLACE_SPECIAL,
        value_discretization_interval=width,
    )
    accountant.compose(event(mechanism, steps=steps))
    return float(accountant.get_epsilon(delta))


def calibrate(mechanism: Mechanism, *, steps: int, delta: float, target: float) -> float:
    """The noise multiplier σ with 0.99 · target ≤ ε(σ) ≤ target; that of ``mechanism`` is unused.

    The search uses coarse discretisations, then a finer one. Its answer is confirmed by
    :func:`epsilon`; where the two differ by more, the search goes on with that.
    """

    def at(noise: float, *, least: float) -> float:
        tried = replace(mechanism, noise_multiplier=noise)
        width = interval(tried, steps=steps, least=least)
        return composed(tried, steps=steps, delta=delta, width=width)

    def fine(noise: float) -> float:
        return epsilon(replace(mechanism, noise_multiplier=noise), steps=steps, delta=delta)

    if target > _LARGEST_TARGET:
        raise UsageError(
            f"epsilon = {target:g} is no guarantee at all",
            fix="epsilon=8.0; or noise_multiplier=, whatever its epsilon",
        )
    if mechanism.cap is not None:  # most caps cost little: the cheaper search is a good start
        uncapped = replace(mechanism, cap=None)
        noise = calibrate(uncapped, steps=steps, delta=delta, target=target)
    else:
        noise = _guess(mechanism, steps=steps, delta=delta, target=target)
    for width in (10 * COARSE, COARSE):
        # rounding up costs about T · width²: a search that it would mislead is left out
        if mechanism.count(steps) * width * width <= 0.05 * target:
            noise = search.decreasing(
                partial(at, least=width), target=target, start=noise, steep=_steep(noise)
            )
    if 0.99 * target <= fine(noise) <= target:
        return noise
    return search.decreasing(fine, target=target, start=noise, steep=_steep(noise))


def _steep(noise: float) -> float:
    """How fast log ε falls with log σ where ε grows with (e^(1/σ²) − 1)^½."""
    inverse = min(noise**-2, 100.0)
    return -inverse / math.expm1(-inverse)


def _guess(mechanism: Mechanism, *, steps: int, delta: float, target: float) -> float:
    """The noise multiplier by the central limit theorem: near the answer, and no bound."""
    scale = 1 / _library().get_sigma_gaussian(target, delta)
    ratio = scale / mechanism.rate / math.sqrt(mechanism.count(steps))
    return float(math.log1p(ratio * ratio) ** -0.5)


def _library() -> Any:
    version()
    importlib.import_module("dp_accounting.pld")
    return importlib.import_module("dp_accounting")
