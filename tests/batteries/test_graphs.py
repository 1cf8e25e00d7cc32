"""Some random graphs on every run; ``make fuzz`` runs two thousand."""

from __future__ import annotations

import pytest

from .. import graphs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", range(5))
def test_exact_or_refused(block: int) -> None:
    verdicts = [graphs.trial(seed) for seed in range(block * 60, block * 60 + 60)]
    assert not [v for v in verdicts if v.startswith("wrong")]
    assert "exact" in verdicts
