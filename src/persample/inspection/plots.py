"""Plots as inline SVG; colours come from the page's style sheet, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import torch
from torch import Tensor

from .health import ClipCurve, Parameter
from .table import number

WIDTH = 720


class Log:
    """A logarithmic axis from low to high onto pixels."""

    def __init__(self, low: float, high: float, left: float, right: float) -> None:
        low = max(low, high * 1e-12, 1e-300)
        if high <= low:
            low, high = low / 3, max(high, low) * 3
        self.low, self.high = math.log10(low), math.log10(high)
        self.left, self.right = left, right

    def __call__(self, value: float) -> float:
        """Pixels; values below the axis sit on its end."""
        if value <= 0:
            return self.left
        part = (math.log10(value) - self.low) / (self.high - self.low)
        return self.left + min(max(part, 0.0), 1.0) * (self.right - self.left)

    def ticks(self) -> list[float]:
        """Powers of ten, thinned to about eight; 2 and 5 between them on short axes."""
        first, last = math.ceil(self.low), math.floor(self.high)
        step = max(1, math.ceil((last - first + 1) / 8))
        found = [10.0**k for k in range(first, last + 1, step)]
        if last - first < 2:
            found = [
                m * 10.0**k
                for k in range(first - 1, last + 1)
                for m in (1, 2, 5)
                if self.low <= math.log10(m * 10.0**k) <= self.high
            ]
        return found


def _svg(height: float, body: str, label: str) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}">{body}</svg>'
    )


def _axis(axis: Log, top: float, bottom: float, title: str) -> str:
    marks = []
    for value in axis.ticks():
        x = axis(value)
        marks.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        marks.append(
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick(value)}</text>'
        )
    middle = (axis.left + axis.right) / 2
    marks.append(
        f'<text class="title" x="{middle:.0f}" y="{bottom + 34}" text-anchor="middle">'
        f"{escape(title)}</text>"
    )
    return "".join(marks)


def tick(value: float) -> str:
    """A short number for an axis."""
    return f"{value:g}" if 1e-3 <= value < 1e5 else f"10{_raised(round(math.log10(value)))}"


def _raised(power: int) -> str:
    return "".join("⁻" if c == "-" else "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(c)] for c in str(power))


def histogram(values: Tensor, title: str, *, marked: Sequence[float] = (), bins: int = 48) -> str:
    """How many samples have which size, on a logarithmic axis; some values marked below."""
    values = values[torch.isfinite(values) & (values > 0)].double()
    if values.numel() == 0:
        return ""
    axis = Log(float(values.min()) * 0.9, float(values.max()) * 1.1, 20, WIDTH - 20)
    edges = torch.linspace(axis.low, axis.high, bins + 1).double()
    counts = torch.histc(values.log10(), bins, axis.low, axis.high)
    top, bottom = 12, 150
    peak = float(counts.max())
    bars = []
    for k, count in enumerate(counts.tolist()):
        if not count:
            continue
        x0, x1 = axis(10 ** float(edges[k])), axis(10 ** float(edges[k + 1]))
        height = max(2.0, count / peak * (bottom - top))
        said = f"{int(count):,} samples from {number(10 ** float(edges[k]))} "
        said += f"to {number(10 ** float(edges[k + 1]))}"
        bars.append(
            f'<rect class="bar" x="{x0 + 0.5:.1f}" y="{bottom - height:.1f}" rx="1.5" '
            f'width="{max(x1 - x0 - 1, 1):.1f}" height="{height:.1f}"><title>{said}</title></rect>'
        )
    for value in marked:
        bars.append(f'<circle class="mark" cx="{axis(value):.1f}" cy="{bottom - 4}" r="3.5"/>')
    body = _axis(axis, top, bottom, title) + "".join(bars)
    return _svg(192, body, f"histogram: {title}")


def clip_plot(curve: ClipCurve) -> str:
    """Fraction clipped and relative bias against the threshold."""
    if len(curve.thresholds) == 0:
        return ""
    low, high = float(curve.thresholds[0]), float(curve.thresholds[-1])
    axis = Log(low, high, 46, WIDTH - 20)
    top, bottom = 12, 220
    body = _axis(axis, top, bottom, "clipping threshold C")

    def y(value: float) -> float:
        return bottom - min(value, 1.0) * (bottom - top)

    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        body += (
            f'<line class="grid" x1="46" x2="{WIDTH - 20}" y1="{y(part):.1f}" y2="{y(part):.1f}"/>'
        )
        body += f'<text x="40" y="{y(part) + 4:.1f}" text-anchor="end">{part:.0%}</text>'
    pairs = (("clipped", curve.clipped), ("bias", curve.bias))
    for name, values in pairs:
        points = [
            (axis(t), y(v), t, v)
            for t, v in zip(curve.thresholds.tolist(), values.tolist(), strict=True)
        ]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in points)
        body += f'<polyline class="line {name}" points="{line}"/>'
        body += "".join(
            f'<circle class="dot {name}" cx="{px:.1f}" cy="{py:.1f}" r="3"><title>C = '
            f"{number(t)}: {name} {v:.0%}</title></circle>"
            for px, py, t, v in points
        )
    return _svg(262, body, "fraction of samples clipped and bias against the threshold")


def boxes(parameters: Sequence[Parameter]) -> str:
    """One box per parameter: 5, 25, 50, 75 and 95 % of the samples' norms."""
    positive = [q for p in parameters for q in p.quantiles[1:6].tolist() if q > 0]
    if not positive:
        return ""
    longest = max(len(p.name) for p in parameters)
    left = min(300, 16 + 6.6 * min(longest, 42))
    axis = Log(min(positive), max(positive), left, WIDTH - 70)
    row, top = 24, 8
    bottom = top + row * len(parameters)
    body = _axis(axis, top, bottom, "norm of the parameter's gradient, per sample")
    for k, p in enumerate(parameters):
        y = top + row * (k + 0.5)
        a, b, c, d, e = (axis(v) for v in p.quantiles[1:6].tolist())
        shown = p.name if len(p.name) <= 42 else "…" + p.name[-41:]
        said = f"{p.name}: median {number(float(p.quantiles[3]))}, largest "
        said += number(float(p.quantiles[6]))
        body += (
            f'<g class="box"><title>{escape(said)}</title>'
            f'<text x="{left - 10:.0f}" y="{y + 4:.1f}" text-anchor="end">{escape(shown)}</text>'
            f'<line class="whisker" x1="{a:.1f}" x2="{e:.1f}" y1="{y}" y2="{y}"/>'
            f'<rect x="{b:.1f}" y="{y - 6}" width="{max(d - b, 1):.1f}" height="12" rx="2"/>'
            f'<line class="median" x1="{c:.1f}" x2="{c:.1f}" y1="{y - 6}" y2="{y + 6}"/>'
            f'<text x="{WIDTH - 60}" y="{y + 4:.1f}">{p.share:.0%}</text></g>'
        )
    return _svg(bottom + 44, body, "distribution of gradient norms in every parameter")


def bars(values: Tensor) -> str:
    """A row of features as small bars around zero."""
    fine = torch.nan_to_num(values.double())
    top = float(fine.abs().max()) or 1.0
    step = 120 / max(len(fine), 1)
    parts = []
    for k, value in enumerate(fine.tolist()):
        height = abs(value) / top * 18
        y = 20 - height if value >= 0 else 20
        parts.append(
            f'<rect x="{k * step:.1f}" y="{y:.1f}" width="{max(step - 0.6, 0.6):.1f}" '
            f'height="{max(height, 0.4):.1f}"/>'
        )
    return f'<svg class="features" viewBox="0 0 120 40" aria-hidden="true">{"".join(parts)}</svg>'
