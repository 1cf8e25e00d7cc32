"""Tests lie in rooms that mirror the source."""

from __future__ import annotations

from pathlib import Path

import persample

TESTS = Path(__file__).parents[1]
SOURCE = Path(persample.__file__).parent

# Rooms that no package has: what they test lies at the top of the source, or outside it.
OTHERS = {
    "api": "modules at the top: record, verify, errors",
    "batteries": "tables of programs that pass through every package",
    "benchmarks": "the benchmark",
    "docs": "pages and commands",
    "house": "the source tree itself",
}


def packages() -> set[str]:
    return {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def test_every_test_lies_in_a_room() -> None:
    assert not list(TESTS.glob("test_*.py"))
    rooms = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert rooms <= packages() | set(OTHERS), rooms - packages() - set(OTHERS)


def test_every_package_has_a_room() -> None:
    rooms = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert packages() <= rooms, packages() - rooms
