"""Everything that docs/works-with.md says, and that it says what happens."""

from __future__ import annotations

import functools

import pytest

from ..works.__main__ import CASES, PAGE, known, page
from ..works.base import Case, Missing, verdict


@functools.cache
def cell(number: int) -> str:
    return verdict(CASES[number])


def row(case: Case) -> str:
    return f"{case.heading}: {case.pattern}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(CASES)), ids=[row(case) for case in CASES])
def test_right_or_refused(number: int) -> None:
    try:
        found = cell(number)
    except Missing as missing:
        pytest.skip(f"{missing} is not installed")
    case = CASES[number]
    assert known().get((case.heading, case.pattern)) == found, "run python -m tests.works"


def test_the_page_has_no_other_rows() -> None:
    assert PAGE.read_text() == page(known())


def test_patterns_are_named_once() -> None:
    names = [row(case) for case in CASES]
    assert len(set(names)) == len(names)
