"""Some of the random programs that go on sample by sample."""

from __future__ import annotations

import pytest

from ..loops import judge


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_random_programs_are_exact_or_refused(first: int) -> None:
    verdicts = [judge(seed) for seed in range(first, first + 20)]
    assert not [v for v in verdicts if v.startswith("wrong")]
    assert verdicts.count("exact") >= 10
