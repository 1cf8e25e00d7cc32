"""Small models and protocols that try to make persample silently wrong."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from ..attacks.__main__ import CASES, SCRIPTS, part
from ..attacks.base import USERS, judge, judge_script

# torch does not swap tensors that something refers to weakly, as the recorder does: loud
LOUD = {"trick: swap_tensors", "trick: swap_tensors twice"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_exact_or_refused(name: str) -> None:
    torch.manual_seed(0)
    broken = []
    for case in part(name).cases():
        verdict = judge(case)
        if verdict.outcome == "invalid" and "derivative for" in verdict.detail:  # an older torch
            continue
        if not verdict.fits(case.expectation) and case.name not in LOUD:
            broken.append(f"{case.name} [{case.expectation}] {verdict.outcome}: {verdict.detail}")
    assert not broken


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_never_wrong_with_several_rows_of_a_sample(name: str) -> None:
    torch.manual_seed(0)
    wrong = []
    for case in part(name).cases():
        verdict = judge(case, n=3, sample_ids=USERS)
        if verdict.outcome == "wrong":
            wrong.append(f"{case.name}: {verdict.detail}")
    assert not wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCRIPTS)
def test_protocols(name: str) -> None:
    torch.manual_seed(0)
    broken = []
    for script in part(name).scripts():
        verdict = judge_script(script)
        if not verdict.fits(script.expectation):
            broken.append(
                f"{script.name} [{script.expectation}] {verdict.outcome}: {verdict.detail}"
            )
    assert not broken


@pytest.mark.filterwarnings("ignore")
def test_there_are_many() -> None:
    assert len(list(chain.from_iterable(part(name).cases() for name in CASES))) > 1000
