"""Programs that were refused without need: each is what its row says, in two training steps."""

from __future__ import annotations

import pytest

from ..third_party.cause import NEEDLESS, Cause
from ..third_party.causes import CAUSES
from ..third_party.judge import FIXED, judge


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cause", CAUSES, ids=[cause.row.name for cause in CAUSES])
def test_as_the_row_says(cause: Cause) -> None:
    verdict = judge(cause.row)
    kind = NEEDLESS if verdict.kind == FIXED else verdict.kind  # its fix is tried below
    assert kind == cause.today, verdict
    if verdict.refusal is not None:
        assert cause.fix in verdict.refusal["fix"], verdict.refusal


FOLLOWED = [cause for cause in CAUSES if cause.follow is not None]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cause", FOLLOWED, ids=[cause.row.name for cause in FOLLOWED])
def test_exact_after_the_fix(cause: Cause) -> None:
    verdict = judge(cause.followed())
    assert verdict.kind == "exact", verdict


def test_every_refusal_has_a_fix_that_is_tried() -> None:
    assert all(cause.fix and cause.follow for cause in CAUSES if cause.today != "exact")
