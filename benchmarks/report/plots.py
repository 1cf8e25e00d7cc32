"""Plots of results, as SVG files that change only when the results do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..measure.results import load
from .rows import NAMES, answer, headline, state
from .tables import MAIN, ordered

QUESTIONS = ("grads", "norms", "clipped sum")
COLOURS = (
    "#1b6ca8", "#7fb3d9", "#0b3d61", "#d1495b", "#edae49", "#b98a2f", "#8d8d8d", "#66a182",
    "#2e6b4f", "#9b5de5", "#f28482", "#3d405b",
)  # fmt: skip
STYLE = {"svg.hashsalt": "persample", "svg.fonttype": "none", "font.size": 9}


def saved(figure: Figure, path: Path) -> None:
    """Write without a date, so that equal results give equal files."""
    figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")


def panel(axes: Axes, models: Any, judged: Any, asked: str, key: str) -> None:
    """One question: a row per model, a mark per correct peer."""
    rows = list(models)
    for name, colour in zip(NAMES, COLOURS, strict=True):
        points = [
            (answer(models[m], name, asked)[key], y)
            for y, m in enumerate(rows)
            if key in answer(models[m], name, asked)
            and state(judged.get(m, {}), name, asked) == "right"
        ]
        if points:
            own = name.startswith("persample")
            axes.scatter(
                *zip(*points, strict=True), s=46 if own else 24, color=colour, label=name,
                marker="D" if own else "o", zorder=3 if own else 2,
            )  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(asked)
    axes.grid(axis="both", linewidth=0.3)


def against_peers(models: Any, judged: Any, key: str, label: str, path: Path) -> None:
    """Three panels, one per question."""
    figure = Figure(figsize=(12, 0.4 * len(models) + 1.8))
    marks: dict[str, Any] = {}
    for index, asked in enumerate(QUESTIONS):
        axes = figure.add_subplot(1, 3, index + 1)
        panel(axes, models, judged, asked, key)
        axes.set_xlabel(label)
        if index:
            axes.set_yticklabels([])
        handles, names = axes.get_legend_handles_labels()
        marks |= dict(zip(names, handles, strict=True))
    marks = {name: marks[name] for name in NAMES if name in marks}
    figure.legend(list(marks.values()), list(marks), loc="lower center", ncols=5,
                  bbox_to_anchor=(0.5, -0.12))  # fmt: skip
    saved(figure, path)


def growth(scale: Any, path: Path) -> None:
    """Time and memory along every axis."""
    figure = Figure(figsize=(12, 6))
    for column, (axis, found) in enumerate(scale.items()):
        for row, (kind, label, unit) in enumerate((("ms", "ms", 1), ("bytes", "MiB", 2**20))):
            axes = figure.add_subplot(2, 3, row * 3 + column + 1)
            sizes = [p["size"] for p in found["points"]]
            for name, slope in found["exponents"][kind].items():
                costs = [p[kind][name] / unit for p in found["points"]]
                axes.plot(sizes, costs, marker=".", label=f"{name} ({slope:.2f})")
            axes.set(xscale="log", yscale="log", xlabel=axis, ylabel=label)
            axes.legend(fontsize=7)
            axes.grid(linewidth=0.3)
    figure.tight_layout()
    saved(figure, path)


def bars(models: Any, sizes: Any, path: Path) -> None:
    """Every library in three bars: models it runs, time and peak memory over persample's."""
    found = headline(models, sizes)
    titles = (
        f"models it runs, of {len(models)}",
        "time of a clipped sum,\npersample = 1",
        "peak memory of a clipped sum,\npersample = 1",
    )
    figure = Figure(figsize=(9, 0.34 * len(found) + 0.9))
    for column, title in enumerate(titles):
        axes = figure.add_subplot(1, 3, column + 1)
        values = [row[column] for row in found.values()]
        colours = ["#1b6ca8" if name == "persample" else "#b9bec6" for name in found]
        drawn = axes.barh(range(len(found)), values, color=colours, height=0.7)
        axes.bar_label(drawn, [f"{v:.{2 if column else 0}f}" for v in values], padding=3)
        axes.set_yticks(range(len(found)), list(found) if not column else [""] * len(found))
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_xlim(0, 1.22 * max(values))
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    saved(figure, path)


def draw(directory: Path, target: Path) -> None:
    """Every plot that has results."""
    models = ordered(load(directory, "peers").get(MAIN, {}))
    sizes = ordered(load(directory, "memory").get("mapped heap, 1 thread", {}))
    scale = load(directory, "scaling").get("default heap, 1 thread", {}).get("all", {})
    with mpl.rc_context(STYLE):
        if models:
            path = target / "benchmarks-time.svg"
            against_peers(models, models, "median", "time / plain step", path)
        if sizes:
            path = target / "benchmarks-memory.svg"
            against_peers(sizes, models, "ratio", "peak memory / plain step", path)
        if models and sizes:
            bars(models, sizes, target / "benchmarks-short.svg")
        if scale:
            growth(scale, target / "benchmarks-growth.svg")
