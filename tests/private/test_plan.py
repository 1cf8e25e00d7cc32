"""What a plan holds, what follows from what, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
import warnings
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch

import persample
from persample import private
from persample.private.plan import PrivacyWarning

pytest.importorskip("dp_accounting")
NAN, INF = float("nan"), float("inf")
GOOD: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "delta": 1e-5,
    "size": 1000,
    "batch_size": 100,
    "steps": 20,
    "max_norm": 0.5,
}


def made(**changes: Any) -> private.Plan:
    """A plan; a change to None leaves an argument out."""
    return private.plan(**{k: v for k, v in (GOOD | changes).items() if v is not None})


# ------------------------------------------------------------------ what follows from what


def test_the_example_of_the_interface() -> None:
    plan = private.plan(epsilon=8, delta=1e-5, size=50_000, batch_size=512, epochs=10, max_norm=1.0)
    assert plan.sample_rate == 512 / 50_000
    assert plan.steps == math.ceil(10 * 50_000 / 512) == 977
    assert (plan.divisor, plan.max_norm, plan.delta) == (512, 1.0, 1e-5)
    assert (plan.size, plan.batch_size, plan.unit, plan.clipping) == (50_000, 512, "sample", "flat")
    assert (plan.cap, plan.bands, plan.target_epsilon) == (None, 1, 8.0)
    assert 0.99 * 8 <= plan.epsilon() <= 8
    assert plan.epsilon(plan.steps) == plan.epsilon() > plan.epsilon(100) > plan.epsilon(0) == 0


EPOCHS = [
    ({"epochs": 2}, 20),
    ({"epochs": 0.05}, 1),
    ({"epochs": 1, "size": 1001}, 11),
    ({"epochs": 1, "size": 999}, 10),
    ({"epochs": 7, "size": None, "batch_size": None, "sample_rate": 0.07}, 100),
    ({"epochs": 0.3, "batch_size": 30}, 10),
]


@pytest.mark.parametrize(("changes", "steps"), EPOCHS)
def test_epochs(changes: dict[str, Any], steps: int) -> None:
    assert made(steps=None, **changes).steps == steps


def test_a_rate_instead_of_a_batch_size() -> None:
    plan = made(batch_size=None, sample_rate=0.1)
    assert (plan.batch_size, plan.divisor) == (100, 100)
    plan = made(batch_size=None, size=None, sample_rate=0.1)
    assert (plan.size, plan.batch_size, plan.divisor) == (None, None, None)
    assert plan.epsilon() == made().epsilon()
    assert made(batch_size=None, size=None, sample_rate=0.1, divisor=64).divisor == 64


def test_an_explicit_divisor_and_norm_do_not_touch_epsilon() -> None:
    assert made(divisor=7, max_norm=30).epsilon() == made().epsilon()


def test_relation() -> None:
    assert made().relation == "zero-out"
    assert made(size=None, batch_size=None, sample_rate=0.1).relation == "add-or-remove"


def test_noise_is_in_units_of_the_norm_and_of_the_column() -> None:
    assert made(noise_multiplier=3.0).noise_std == 3.0 * 0.5
    two = made(noise_multiplier=3.0, bands=2)
    assert two.noise_std == pytest.approx(3.0 * 0.5 * math.sqrt(1.25))
    assert two.group_rate == 0.2


def test_everything_may_be_drawn() -> None:
    assert made(batch_size=1000).sample_rate == 1.0
    assert made(batch_size=100, bands=10).group_rate == 1.0  # 10 · 0.1 is not above 1


def test_numbers_of_other_libraries() -> None:
    numpy = pytest.importorskip("numpy")
    plan = made(
        size=numpy.int64(1000), delta=torch.tensor(1e-5).double(), max_norm=numpy.float32(1)
    )
    assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()


# ------------------------------------------------------------------ a value


def test_a_plan_is_a_frozen_value() -> None:
    plan = made(bands=2, clipping="per_layer", unit="user")
    with pytest.raises(FrozenInstanceError):
        plan.noise_multiplier = 0.1  # type: ignore[misc]
    again = private.Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    for other in (again, copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        assert other.fingerprint() == plan.fingerprint()
        assert hash(other) == hash(plan)
    assert set(plan.to_dict()) == {field.name for field in fields(private.Plan)}


CHANGES = [
    {"noise_multiplier": 1.1}, {"delta": 1e-6}, {"size": 1001}, {"batch_size": 101}, {"steps": 21},
    {"max_norm": 1.0}, {"divisor": 99}, {"unit": "user"}, {"clipping": "automatic"}, {"cap": 200},
    {"bands": 2},
]  # fmt: skip


def test_a_fingerprint_tells_every_constant() -> None:
    found = [made(**change).fingerprint() for change in [{}, *CHANGES]]
    assert len(set(found)) == len(found)


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "from persample import private; print(private.plan(noise_multiplier=1.0, delta=1e-5, "
        "size=1000, batch_size=100, steps=20, max_norm=0.5).fingerprint())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == made().fingerprint()


# ------------------------------------------------------------------ refused

BAD: dict[str, dict[str, Any]] = {
    "epsilon of zero": {"noise_multiplier": None, "epsilon": 0},
    "negative epsilon": {"noise_multiplier": None, "epsilon": -1},
    "epsilon of nan": {"noise_multiplier": None, "epsilon": NAN},
    "infinite epsilon": {"noise_multiplier": None, "epsilon": INF},
    "true as epsilon": {"noise_multiplier": None, "epsilon": True},
    "text as epsilon": {"noise_multiplier": None, "epsilon": "8"},
    "epsilon and noise": {"epsilon": 8},
    "neither epsilon nor noise": {"noise_multiplier": None},
    "no noise": {"noise_multiplier": 0},
    "negative noise": {"noise_multiplier": -1},
    "noise of nan": {"noise_multiplier": NAN},
    "infinite noise": {"noise_multiplier": INF},
    "true as noise": {"noise_multiplier": True},
    "delta of zero": {"delta": 0},
    "delta of one": {"delta": 1.0},
    "negative delta": {"delta": -1e-5},
    "delta of nan": {"delta": NAN},
    "true as delta": {"delta": True},
    "rate above one": {"batch_size": None, "sample_rate": 1.01},
    "rate of zero": {"batch_size": None, "sample_rate": 0.0},
    "rate of nan": {"batch_size": None, "sample_rate": NAN},
    "true as rate": {"batch_size": None, "sample_rate": True},
    "rate and batch size": {"sample_rate": 0.1},
    "neither rate nor batch size": {"batch_size": None},
    "batch size without a size": {"size": None},
    "batch size above the size": {"batch_size": 1001},
    "batch size of zero": {"batch_size": 0},
    "half a batch size": {"batch_size": 2.5},
    "true as batch size": {"batch_size": True},
    "size of zero": {"size": 0},
    "half a size": {"size": 1000.5},
    "true as size": {"size": True},
    "epochs and steps": {"epochs": 2},
    "neither epochs nor steps": {"steps": None},
    "no steps": {"steps": 0},
    "half a step": {"steps": 1.5},
    "true as steps": {"steps": True},
    "no epochs": {"steps": None, "epochs": 0},
    "epochs of nan": {"steps": None, "epochs": NAN},
    "endless epochs": {"steps": None, "epochs": 1e300},
    "no norm": {"max_norm": 0},
    "norm of nan": {"max_norm": NAN},
    "infinite norm": {"max_norm": INF},
    "no divisor": {"divisor": 0},
    "divisor of nan": {"divisor": NAN},
    "unknown unit": {"unit": "row"},
    "unknown clipping": {"clipping": "adaptive"},
    "clipping that is no word": {"clipping": persample.flat},
    "cap of zero": {"cap": 0},
    "half a cap": {"cap": 10.5},
    "text as cap": {"cap": "large"},
    "cap above the size": {"cap": 1001},
    "cap without a size": {"cap": 10, "size": None, "batch_size": None, "sample_rate": 0.1},
    "auto cap without a size": {
        "cap": "auto", "size": None, "batch_size": None, "sample_rate": 0.1
    },
    "cap with bands": {"cap": 200, "bands": 2},
    "no bands": {"bands": 0},
    "true as bands": {"bands": True},
    "bands whose groups are too small": {"bands": 11},
    "bands above the steps": {"bands": 6, "steps": 5},
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(persample.UsageError) as caught:
        made(**BAD[name])
    assert caught.value.fix
    assert len(str(caught.value).splitlines()) <= 4


def test_arguments_have_names() -> None:
    with pytest.raises(TypeError):
        private.plan(8, 1e-5)  # type: ignore[misc]


@pytest.mark.parametrize(
    "values",
    [{}, [], {"steps": 3}, "plan"],
    ids=["empty", "list", "one", "text"],
)
def test_what_is_no_plan_is_refused(values: Any) -> None:
    with pytest.raises(persample.UsageError, match="constants of a plan"):
        private.Plan.from_dict(values)


TAMPERED = [{"sample_rate": 0.2}, {"batch_size": 50}, {"size": None}, {"bands": 99}, {"steps": 0}]


@pytest.mark.parametrize("change", TAMPERED)
def test_constants_that_contradict_each_other_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(persample.UsageError):
        private.Plan.from_dict(made().to_dict() | change)


@pytest.mark.parametrize("steps", [-1, 1.5, True, NAN, "3"])
def test_epsilon_of_no_number_of_steps(steps: Any) -> None:
    for question in (made().epsilon, made().statement, made().event):
        with pytest.raises(persample.UsageError):
            question(steps)


def test_nothing_is_searched_for_a_plan_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **options: Any) -> float:
        raise AssertionError

    monkeypatch.setattr(private.accounting, "calibrate", never)
    with pytest.raises(persample.UsageError):
        made(noise_multiplier=None, epsilon=8, clipping="none")


# ------------------------------------------------------------------ a delta that is too large


@pytest.mark.parametrize("unit", ["sample", "user"])
def test_a_large_delta_is_warned_of_at_the_callers_line(unit: str) -> None:
    with pytest.warns(PrivacyWarning, match=f"one {unit} at random") as seen:
        private.plan(**(GOOD | {"delta": 1e-3, "unit": unit}))
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(delta=0.99e-3)
