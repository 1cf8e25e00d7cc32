"""Models as they are: tied weights, position ids, recurrent layers, experts, dropout."""

from __future__ import annotations

import pytest

from persample import private

from .check_replay import LARGER, maker


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LARGER)
def test_replay_of_one_step(name: str) -> None:
    try:
        subject = LARGER[name]()
    except ImportError as error:
        pytest.skip(str(error))
    report = private.replay(maker(subject, "flat"), subject[2], remove=17, steps=1)
    assert report.ok, str(report)
    assert report.compared[0].contribution > 0
