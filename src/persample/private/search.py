"""Find where a decreasing function that is expensive to call reaches a target."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import UsageError

_CLOSE = 0.997  # of the target: what is near enough
_LARGEST = 40.0  # logarithm of an argument


def decreasing(
    function: Callable[[float], float], *, target: float, start: float, steep: float = 2.0
) -> float:
    """An x with 0.997 · target ≤ function(x) ≤ target, from a start near it.

    Straight lines through two points in log-log coordinates, kept inside the bracket once there
    is one; bisection if those are slow. The first line falls by ``steep``. The function may be
    infinite on the left. Refused if there is no such x.
    """
    aim, place = math.log(target * (1 + _CLOSE) / 2), math.log(start)
    low, high = -_LARGEST, _LARGEST
    seen: list[tuple[float, float]] = []
    for turn in range(60):
        value = function(math.exp(place))
        if _CLOSE * target <= value <= target:
            return math.exp(place)
        low, high = (place, high) if value > target else (low, place)
        if 0 < value < math.inf:
            seen.append((place, math.log(value) - aim))
        if high - low < 1e-7:  # the function jumps over the target
            break
        place = _next(seen[-2:], low, high, steep=steep, bisect=turn >= 10)
    raise UsageError(
        f"no noise multiplier was found that gives epsilon = {target:g}",
        why="dp-accounting resolves privacy losses of about 1e-4 and probabilities of about 1e-14",
        fix="a larger epsilon or delta, or noise_multiplier= instead of epsilon=",
    )


def _next(
    seen: list[tuple[float, float]], low: float, high: float, *, steep: float, bisect: bool
) -> float:
    """Where to look next: on a line through the last points, strictly inside the bracket."""
    bounded = low > -_LARGEST and high < _LARGEST
    if bisect and bounded:
        return (low + high) / 2
    if not seen:
        return low + 1.0 if low > -_LARGEST else high - 1.0  # infinite, or zero, so far
    if len(seen) == 2 and seen[0][0] != seen[1][0]:
        steep = (seen[0][1] - seen[1][1]) / (seen[1][0] - seen[0][0])
    place, excess = seen[-1]
    step = excess / min(20.0, max(0.5, steep))
    margin = 0.02 * (high - low) if bounded else 0.0
    return min(high - margin, max(low + margin, place + max(-1.5, min(1.5, step))))
