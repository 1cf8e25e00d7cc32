"""What a plan's constants may be, and how one follows from another."""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

from ..errors import UsageError
from ..validation import number, shown, whole

UNITS = ("sample", "user")
CLIPPINGS = ("flat", "automatic", "per_layer")


class PrivacyWarning(UserWarning):
    """A plan is consistent, but its guarantee means little."""


def positive(value: Any, what: str, *, fix: str) -> float:
    """A finite number above zero."""
    found = number(value, what, fix=fix)
    if not (math.isfinite(found) and found > 0):
        raise UsageError(f"{what} must be finite and above 0, got {shown(value)}", fix=fix)
    return found


def fraction(value: Any, what: str, *, fix: str, closed: bool = False) -> float:
    """A number in (0, 1), or in (0, 1] if ``closed``."""
    found = positive(value, what, fix=fix)
    if found > 1 or (found == 1 and not closed):
        end = "]" if closed else ")"
        raise UsageError(f"{what} must be in (0, 1{end}, got {shown(value)}", fix=fix)
    return found


def checked(values: dict[str, Any]) -> dict[str, Any]:
    """A plan's constants as plain Python numbers; what contradicts itself is refused."""
    size, cap = values["size"], values["cap"]
    rate = fraction(
        values["sample_rate"], "sample_rate", closed=True, fix="sample_rate=batch_size / size"
    )
    found = dict(
        values,
        noise_multiplier=positive(
            values["noise_multiplier"], "noise_multiplier", fix="noise_multiplier=1.0"
        ),
        sample_rate=rate,
        steps=whole(values["steps"], "steps", least=1),
        max_norm=positive(values["max_norm"], "max_norm", fix="max_norm=1.0"),
        delta=fraction(values["delta"], "delta", fix="delta=1e-5, and below 1 / size"),
        size=None if size is None else whole(size, "size", least=1),
        bands=whole(values["bands"], "bands", least=1),
        cap=None if cap is None else whole(cap, "cap", least=1, fix='cap="auto"'),
    )
    for name, fix in (
        ("batch_size", "batch_size=512"),
        ("divisor", "divisor=batch_size"),
        ("target_epsilon", "epsilon=8.0"),
    ):
        if values[name] is not None:
            found[name] = positive(values[name], name, fix=fix)
    one_of(values["unit"], "unit", UNITS)
    one_of(values["clipping"], "clipping", CLIPPINGS)
    _consistent(found)
    return found


def _consistent(found: dict[str, Any]) -> None:
    """Refuse constants that contradict each other."""
    size, batch, cap, bands = (found[k] for k in ("size", "batch_size", "cap", "bands"))
    rate, steps = found["sample_rate"], found["steps"]
    if (size is None) is not (batch is None):
        raise UsageError("a plan has both size and batch_size, or neither", fix="give both")
    if size is not None and not math.isclose(batch / size, rate, rel_tol=1e-9):
        raise UsageError(
            f"batch_size / size is {batch / size:g}, but sample_rate is {rate:g}",
            fix="sample_rate=batch_size / size",
        )
    if bands > 1 and bands * rate > 1 + 1e-12:
        raise UsageError(
            f"{bands} bands need a rate of {bands * rate:.3g} inside each of {bands} groups",
            why="a step draws from one group alone, with probability bands · batch_size / size",
            fix=f"bands={max(1, int(1 / rate))}, or a smaller batch_size",
        )
    if bands > steps:
        raise UsageError(f"{bands} bands are more than {steps} steps", fix=f"bands={steps} at most")
    if cap is not None:
        _expect_cap(cap, size, batch, bands)


def _expect_cap(cap: int, size: int | None, batch: float | None, bands: int) -> None:
    if size is None or batch is None:
        raise UsageError(
            "a cap can only be accounted for with the number of records",
            fix="give size= beside sample_rate=, or leave cap out",
        )
    if bands > 1:
        raise UsageError(
            "cap and bands cannot be accounted for together",
            fix="leave one of the two out",
        )
    if cap > size:
        raise UsageError(f"a cap of {cap} on {size} records does nothing", fix="leave cap out")


def one_of(value: Any, what: str, known: tuple[str, ...]) -> None:
    """Refuse what is not one of these words."""
    if not isinstance(value, str) or value not in known:
        listed = ", ".join(repr(word) for word in known)
        raise UsageError(
            f"{what} must be one of {listed}; got {shown(value)}", fix=f"{what}={known[0]!r}"
        )


def sampling(size: int | None, batch_size: Any, sample_rate: Any) -> tuple[float, float | None]:
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


def updates(
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


def noise(epsilon: Any, noise_multiplier: Any) -> float | None:
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


def warn_of_delta(delta: float, size: int | None, unit: str) -> None:
    """Warn of a δ at which releasing one whole record would count as private."""
    if size is not None and delta >= 1 / size:
        warnings.warn(
            f"delta={delta:g} is not below 1 / size = {1 / size:.3g}: publishing one {unit} at "
            "random would count as private; choose delta well below 1 / size",
            PrivacyWarning,
            stacklevel=3,
        )
