"""Labels that the user changed on purpose are counted, marked, and told first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import persample

from .inspected import report


def test_both_rankings_are_counted() -> None:
    found = report(ids=range(100, 160))
    best = found.suspicion.score.topk(3).indices
    losses = set(found.losses.topk(3).indices.tolist())
    planted = found.mark_planted((best + 100).tolist())
    assert planted.positions == frozenset(best.tolist())
    assert planted.found == 3
    assert planted.found_by_loss == len(planted.positions & losses)


def test_the_count_comes_first_and_the_page_marks_the_samples(tmp_path: Path) -> None:
    found = report()
    assert "planted" not in str(found)
    page = found.to_html(tmp_path / "p.html").read_text()
    assert "planted</span>" not in page
    best = found.suspicion.score.topk(2).indices.tolist()
    found.mark_planted(best)
    assert str(found).splitlines()[2].startswith("2 of the 2 planted wrong labels found; ranking")
    page = found.to_html(tmp_path / "p.html").read_text()
    assert page.index("tile good wide") < page.index(">Suspects</h2>")
    assert page.count("planted</span></td>") >= 2
    assert page.rindex('href="#cost"><strong>') > page.rindex('href="#check"><strong>')


def test_samples_that_are_not_finite_are_not_found() -> None:
    found = report()
    found.finite[5], found.losses[5] = False, torch.nan
    assert found.mark_planted([5]).found == 0
    assert found.mark_planted([5]).found_by_loss == 0


def test_none_and_unknown_ids() -> None:
    found = report()
    assert found.mark_planted([]).found == 0
    with pytest.raises(persample.UsageError, match="not in this report"):
        found.mark_planted([3, "3"])
