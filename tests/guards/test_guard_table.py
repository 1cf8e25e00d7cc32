"""The guard table: guards are found, counted and switched off one at a time."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import persample
from benchmarks.measure.results import RESULTS

from ..guard_table.__main__ import CHECKS, COLUMNS, WITHOUT, count
from ..guard_table.listed import GUARDS, OTHER, guard_of, switched_off
from ..guard_table.notes import SOURCE, instruments, noting
from ..guard_table.programs import EXACT, WRONG, Program

STEPPED = "the contents of parameters changed, unseen by version counters"


def stepped() -> str:
    """An optimizer that torch does not count the writes of, between backward and a query."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(5, 4)

    def total(*, step: bool) -> torch.Tensor:
        with persample.record(model, lean=True) as tape:
            tape.backward(model(x).square().sum(1))
        if step:
            model[2].weight.detach().numpy()[:] += 1.0
        return tape.clipped_sum(0.1)["0.weight"]

    return EXACT if torch.allclose(total(step=False), total(step=True)) else WRONG


def right() -> str:
    model = nn.Linear(3, 2)
    with persample.record(model) as tape:
        tape.backward(model(torch.randn(4, 3)).square().sum(1))
    tape.norms()
    return EXACT


def test_counts() -> None:
    programs = [Program("here", "stepped", (stepped,) * 2), Program("here", "right", (right,) * 2)]
    found, seen = count(programs)
    assert seen == {"here": 2}
    assert found[STEPPED] == {"looked": 1, "refused": 1, WITHOUT[WRONG]: 1}
    assert found["an ordinary gradient reached a parameter"] == {"looked": 2}


def test_a_refusal_is_its_guards() -> None:
    model = nn.Linear(3, 2)
    model.weight.register_hook(lambda grad: grad)
    with (
        instruments(CHECKS),
        noting() as notes,
        pytest.raises(persample.UsageError),
        persample.record(model) as tape,
    ):
        tape.backward(model(torch.randn(4, 3)).square().sum(1))
    assert guard_of(notes) == "a parameter has a gradient hook"


@pytest.mark.parametrize("name", [guard.name for guard in GUARDS])
def test_every_guard_is_there(name: str) -> None:
    """What is patched exists, and the functions that build errors do."""
    guard = next(g for g in GUARDS if g.name == name)
    with instruments(CHECKS), switched_off(name):
        pass
    for site in guard.sites:
        file, _, function = site.partition(":")
        assert f"def {function.rpartition('.')[2]}(" in (SOURCE / file).read_text(), site
    assert all((SOURCE / part).exists() for part in guard.file.split(", "))


def test_the_committed_table_has_these_guards() -> None:
    rows = json.loads((RESULTS / "guards.json").read_text())["guards"]
    assert list(rows) == [*CHECKS, OTHER], "run python -m tests.guard_table"
    for row in rows.values():
        assert row["refused"] >= sum(row[column] for column in COLUMNS[2:])
