"""Try every case and write the table: python -m tests.works [--check]."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from . import adapters, checkpointing, compiled, patterns, precision, processes, reuse
from .base import Case, Missing, verdict

PAGE = Path(__file__).parent.parent.parent / "docs" / "works-with.md"
PARTS = (checkpointing, precision, patterns, adapters, compiled, processes, reuse)
CASES: list[Case] = [case for part in PARTS for case in part.CASES.all]
HEAD = """# What it works with

Every row is a test. A program with the pattern is recorded, and its answers (gradients, norms,
clipped sum) are compared with one sample at a time, or with the plain program where the pattern is
about behaviour. *Right* means equal to rounding; *refused* means an error that says what to do.
This page is written by `python -m tests.works`.
"""


def known() -> dict[tuple[str, str], str]:
    """The committed cells, by heading and pattern."""
    cells = {}
    heading = ""
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("| ") and not line.startswith(("| pattern", "|---")):
            pattern, cell = (text.strip() for text in line.strip("| ").split(" | "))
            cells[heading, pattern] = cell
    return cells


def page(cells: dict[tuple[str, str], str]) -> str:
    """The whole page."""
    lines = [HEAD]
    for part in PARTS:
        lines += [f"## {part.CASES.heading}", "", "| pattern | |", "|---|---|"]
        lines += [f"| {c.pattern} | {cells[c.heading, c.pattern]} |" for c in part.CASES.all]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Print what is not as expected; write the page if all is."""
    warnings.simplefilter("ignore")
    cells, broken, committed = {}, 0, known()
    words = [a for a in sys.argv[1:] if not a.startswith("-")]
    for case in CASES:
        key = case.heading, case.pattern
        if words and not any(word in f"{case.heading} {case.pattern}" for word in words):
            continue
        try:
            cells[key] = verdict(case)
            if words:
                print(f"  {case.pattern}: {cells[key]}", flush=True)
        except Missing as missing:
            print(f"? {case.pattern}: {missing} is not installed")
            cells[key] = committed.get(key, "")
        except Exception as error:
            broken += 1
            print(f"! {case.pattern}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(cells) + broken} cases, {broken} not as expected")
    if not broken and not words:
        PAGE.write_text(page(cells))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
