"""How far a Linear goes through the source: packages and files, counted by tracing."""

from __future__ import annotations

import pytest

from ..way import BEFORE, Way, measured

# Packages that each part of a step enters. Lower them, never raise them.
PACKAGES = {
    "F.linear, first call": 3,
    "F.linear, known": 3,
    "model(x), first call": 4,
    "model(x), known": 4,
    "backward": 9,
    "norms": 5,
    "clipped_sum": 5,
}


# How often questions enter packages: all parameters are handed over at once.
ENTRIES = {"norms": {"tape": 1, "forms": 1}, "clipped_sum": {"tape": 1, "forms": 2}}


@pytest.fixture(scope="module")
def ways() -> dict[str, Way]:
    return measured()


@pytest.mark.parametrize("part", PACKAGES)
def test_packages(ways: dict[str, Way], part: str) -> None:
    assert len(ways[part].packages) <= PACKAGES[part], ways[part].packages


@pytest.mark.parametrize("part", ENTRIES)
def test_entries(ways: dict[str, Way], part: str) -> None:
    found = ways[part].entries
    assert {name: found[name] for name in ENTRIES[part]} == ENTRIES[part]


def test_the_trace_sees_what_it_should(ways: dict[str, Way]) -> None:
    assert set(ways) == set(PACKAGES) == set(BEFORE)
    assert "recording/use_capture.py" in ways["F.linear, known"].files["recording"]
    assert "rules/linear.py" in ways["backward"].files["rules"]
    assert ways["norms"].packages[0] == "tape"
    assert all(count >= 1 for way in ways.values() for count in way.entries.values())
