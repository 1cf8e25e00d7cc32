"""Rebuild every table and plot from the committed results.

    python -m benchmarks.tables [--check]

Tables stand between ``<!-- bench:NAME -->`` and ``<!-- /bench -->`` in README.md and some pages of
docs. ``--check`` writes nothing and fails if a page would change.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..measure.results import RESULTS, ROOT, load
from ..models import ALL
from .findings import budgets, drop_in, guards, inspecting, processes, small, suspects
from .private import accuracy, proofs, steps_of_training
from .rows import (
    alive,
    beside,
    growth,
    messages,
    overhead,
    own,
    parts,
    question,
    short,
    steps,
    surroundings,
)

PAGES = (
    "README.md", "docs/benchmarks.md", "docs/results.md", "docs/inspect.md", "docs/design.md",
    "docs/private-training.md",
)  # fmt: skip
MAIN = "warm heap, 1 thread"
NOTHING = "Not measured yet: `make bench`."


def makers(directory: Path) -> dict[str, Callable[[], str]]:
    """A function for each name that a page may ask for."""
    peers, memory = load(directory, "peers"), load(directory, "memory")
    main = ordered(peers.get(MAIN, {}))
    cold = ordered(peers.get("default heap, 1 thread", {}))
    sizes = ordered(memory.get("mapped heap, 1 thread", {}))
    scale = load(directory, "scaling").get("default heap, 1 thread", {}).get("all", {})
    extra = load(directory, "overhead").get(MAIN, {}).get("all", {})
    found: dict[str, Callable[[], str]] = {
        "short": lambda: short(main, sizes),
        "beside": lambda: beside(main, sizes),
        "alive": lambda: alive(sizes),
        "messages": lambda: messages(main),
        "growth": lambda: growth(scale),
        "overhead": lambda: overhead(extra),
        "threads": lambda: own(ordered(peers.get("warm heap, 2 threads", {}))),
        "parts": lambda: parts(extra),
        "steps": lambda: steps(extra),
        "environment": lambda: surroundings(load(directory, "environment")),
        "drop-in": lambda: drop_in(load(directory, "expanded_weights")),
        "guards": lambda: guards(load(directory, "guards")),
        "suspects": lambda: suspects(load(directory, "suspects")),
        "small": lambda: small(load(directory, "small").get(MAIN, {}).get("all", {})),
        "budgets": lambda: budgets(load(directory, "budgets").get(MAIN, {}).get("all", {})),
        "processes": lambda: processes(load(directory, "processes").get(MAIN, {}).get("all", {})),
        "inspecting": lambda: inspecting(load(directory, "inspecting")),
        "private-accuracy": lambda: accuracy(load(directory, "private_accuracy")),
        "private-step": lambda: steps_of_training(load(directory, "private_step")),
        "private-proofs": lambda: proofs(
            load(directory, f"private_{part}") for part in ("accounting", "replay", "noise")
        ),
    }
    for name in ("grads", "norms", "clipped sum", "gram"):
        key = name.replace(" ", "-")
        found[f"time-{key}"] = lambda q=name: question(main, q, "median")
        found[f"default-{key}"] = lambda q=name: question(cold, q, "median")
        found[f"memory-{key}"] = lambda q=name: question(sizes, q, "ratio", judged=main)
    return found


def ordered(models: dict[str, Any]) -> dict[str, Any]:
    """Models in the benchmark's order."""
    known = {name: models[name] for name in ALL if name in models}
    return known | {name: value for name, value in models.items() if name not in known}


def filled(text: str, made: dict[str, Callable[[], str]]) -> str:
    """A page with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        body = made[match[1]]() or NOTHING
        return f"<!-- bench:{match[1]} -->\n{body}\n<!-- /bench -->"

    return re.sub(r"<!-- bench:([\w-]+) -->\n.*?<!-- /bench -->", table, text, flags=re.DOTALL)


def main() -> None:
    """Rewrite the pages and plots, or check the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    made = makers(given.results)
    for page in PAGES:
        path = ROOT / page
        old = path.read_text()
        new = filled(old, made)
        if given.check and new != old:
            sys.exit(f"{page} is not what the results give: run python -m benchmarks.tables")
        if not given.check:
            path.write_text(new)
    if not given.check:
        from .plots import draw

        draw(given.results, ROOT / "docs")


if __name__ == "__main__":
    main()
