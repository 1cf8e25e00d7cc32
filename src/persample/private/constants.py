"""The public constants of a private training: what they may be, and what follows from them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from ..errors import UsageError
from ..validation import number, shown, whole
from . import accounting, banded

UNITS = ("sample", "user")
CLIPPINGS = ("flat", "automatic", "per_layer")


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants by name; those that contradict each other are refused.

    :class:`persample.private.Plan` says what each of them is.
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
        for name, value in checked(asdict(self)).items():
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
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Those whose :meth:`to_dict` this is; its constants are checked again."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != names:
            raise UsageError(
                f"these are not the constants of a plan: {shown(values)}",
                fix="Plan.from_dict takes what plan.to_dict() returned",
            )
        return cls(**values)


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
