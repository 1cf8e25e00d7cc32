"""What clipping would do, how noisy gradients are, how large they are in every parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .neighbours import blocks

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True, slots=True)
class ClipCurve:
    """For each threshold: the fraction of samples clipped and what it does to the mean gradient.

    ``bias`` is ‖mean of clipped − mean‖ / ‖mean‖, estimated from projections.
    """

    thresholds: Tensor
    clipped: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class Noise:
    """The simple gradient noise scale tr Σ / |G|² over several batches.

    ``low`` and ``high`` leave out one batch at a time (jackknife, two standard errors). ``value``
    is None where the mean gradient cannot be told from zero.
    """

    value: float | None
    low: float | None
    high: float | None
    trace: float
    sq_gradient: float
    batches: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: quantiles (0, 5, 25, 50, 75, 95, 100 %) of its per-sample norms."""

    name: str
    shape: tuple[int, ...]
    quantiles: Tensor
    share: float


def clip_curve(projections: Tensor, norms: Tensor, usable: Tensor, points: int = 33) -> ClipCurve:
    """Thresholds from a tenth of the 5 % quantile to the largest norm."""
    sizes = norms[usable].double()
    positive = sizes[sizes > 0]
    if positive.numel() == 0:
        empty = torch.zeros(0, dtype=torch.float64)
        return ClipCurve(empty, empty, empty)
    low = float(_quantile(positive, 0.05)) / 10
    high = float(positive.max())
    start, stop = math.log10(low), math.log10(high)
    thresholds = torch.logspace(start, stop, points, dtype=torch.float64)
    thresholds[-1] = high
    clipped = torch.stack([(sizes > t).double().mean() for t in thresholds])
    mean = torch.zeros(projections.shape[1], dtype=torch.float64)
    sums = torch.zeros(points, projections.shape[1], dtype=torch.float64)
    for first, last in blocks(len(norms)):
        keep = usable[first:last]
        rows = projections[first:last][keep].double()
        mean += rows.sum(0)
        own = norms[first:last][keep].double().clamp(min=torch.finfo(torch.float64).tiny)
        sums += (thresholds.unsqueeze(1) / own).clamp(max=1) @ rows
    length = mean.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return ClipCurve(thresholds, clipped, (sums - mean).norm(dim=1) / length)


def noise(parts: Tensor) -> Noise | None:
    """From rows (n, meanᵢ‖gᵢ‖², ‖meanᵢ gᵢ‖²), one per batch; None without two usable batches."""
    parts = parts[(parts[:, 0] >= 2) & torch.isfinite(parts).all(1)].double()
    if len(parts) < 2:
        return None
    n, m, big = parts.unbind(1)
    gradient, trace = (n * big - m) / (n - 1), (m - big) / (1 - 1 / n)
    g, t = float(gradient.mean()), float(trace.mean())
    count = len(parts)
    rest_g = (gradient.sum() - gradient) / (count - 1)
    rest_t = (trace.sum() - trace) / (count - 1)
    error = float(((count - 1) / count * (rest_g - rest_g.mean()).square().sum()).sqrt())
    if g <= 2 * error:
        return Noise(None, None, None, t, g, count)
    ratios = rest_t / rest_g
    spread = 2 * float(((count - 1) / count * (ratios - ratios.mean()).square().sum()).sqrt())
    return Noise(t / g, max(0.0, t / g - spread), t / g + spread, t, g, count)


def parameters(
    names: list[str], shapes: list[tuple[int, ...]], norms: Tensor, usable: Tensor
) -> list[Parameter]:
    """One row per parameter from per-sample norms (N, parameters)."""
    quantiles, squares = [], []
    for k in range(len(names)):  # a column at a time: all of them may be in a file
        column = norms[:, k][usable].float()
        quantiles.append(torch.stack([_quantile(column, q) for q in QUANTILES]))
        squares.append(float(column.double().square().sum()))
    total = sum(squares) or 1.0
    return [
        Parameter(name, shapes[k], quantiles[k], squares[k] / total) for k, name in enumerate(names)
    ]


def _quantile(values: Tensor, q: float) -> Tensor:
    """The value at rank q of the sorted values (``torch.quantile`` has a limit on size)."""
    if values.numel() == 0:
        return values.new_zeros(())
    k = 1 + round(q * (values.numel() - 1))
    return values.kthvalue(k).values
