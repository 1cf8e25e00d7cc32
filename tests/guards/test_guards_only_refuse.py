"""Guards only refuse: without them, every right program gives the same numbers."""

from __future__ import annotations

import pytest
import torch

import persample
from persample.testing import oracle, relative_error
from tests.guard_table.no_guards import switched_off

from ..attacks.__main__ import CASES as ATTACKS
from ..attacks.__main__ import SCRIPTS, part
from ..attacks.base import EXACT, judge, judge_script
from ..batteries.test_models import double, loss
from ..models import MODELS
from ..works.__main__ import CASES as WORKS
from ..works.base import Missing, verdict


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    torch.manual_seed(0)
    model, batch = double(*MODELS[name](3))
    expected = oracle(model, loss, batch, n=3)
    with switched_off(), persample.record(model, n=3) as tape:
        tape.backward(loss(model, batch))
    assert relative_error(tape.grads(), expected) < 1e-9


RIGHT = [case for case in WORKS if case.right and case.heading != "Several processes"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", RIGHT, ids=[f"{c.heading}: {c.pattern}" for c in RIGHT])
def test_what_works(case: object) -> None:
    try:
        with switched_off():
            assert verdict(case).startswith("right")
    except Missing as missing:
        pytest.skip(f"{missing} is not installed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ATTACKS)
def test_exact_attacks(name: str) -> None:
    torch.manual_seed(0)
    broken = []
    with switched_off():
        for case in part(name).cases():
            if case.expectation == EXACT:
                found = judge(case)
                if found.outcome != "exact":
                    broken.append(f"{case.name}: {found.outcome} {found.detail}")
    assert not broken


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCRIPTS)
def test_exact_protocols(name: str) -> None:
    torch.manual_seed(0)
    broken = []
    with switched_off():
        for script in part(name).scripts():
            if script.expectation == EXACT:
                found = judge_script(script)
                if found.outcome != "exact":
                    broken.append(f"{script.name}: {found.outcome} {found.detail}")
    assert not broken


def test_something_is_refused_with_guards_alone() -> None:
    """The switch works: a parameter that was stepped is not noticed without them."""
    model = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2))

    def stepped() -> persample.Tape:
        with persample.record(model) as tape:
            tape.backward(model(torch.randn(4, 3)).square().sum(1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.add_(1.0)
        return tape

    with pytest.raises(persample.StaleError):
        stepped().norms()
    with switched_off():
        tape = stepped()
    assert tape.norms().shape == (4,)
