"""The bound on given guesses, and an audit of a whole training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample
from persample import private
from persample.private.audit import Audit, audit
from persample.private.canaries import Mixture, Samples, not_a_number
from persample.private.guessing import guess, lower_bound, p_value

pytest.importorskip("dp_accounting")
ANSWERS = json.loads((Path(__file__).parent / "one_run.json").read_text())
NAN = float("nan")

# ------------------------------------------------------------------ the bound


@pytest.mark.parametrize("case", ANSWERS["cases"], ids=lambda case: str(case["canaries"]))
def test_equal_to_another_implementation_on_the_same_scores(case: dict[str, Any]) -> None:
    scores = torch.tensor(case["scores"], dtype=torch.float64)
    included = torch.tensor(case["included"]).bool()
    for answer in case["answers"]:
        chosen = scores >= answer["threshold"]
        found = lower_bound(
            canaries=len(scores),
            guesses=int(chosen.sum()),
            correct=int((chosen & included).sum()),
            delta=case["delta"],
            confidence=case["confidence"],
        )
        assert found == pytest.approx(answer["epsilon"], abs=2e-6)


@pytest.mark.parametrize(("guesses", "correct"), [(1, 1), (20, 17), (80, 80), (100, 51)])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
def test_p_value_by_adding_up(guesses: int, correct: int, epsilon: float) -> None:
    chance = 1 / (1 + math.exp(-epsilon))
    masses = [
        math.comb(guesses, k) * chance**k * (1 - chance) ** (guesses - k)
        for k in range(guesses + 1)
    ]
    exact = math.fsum(masses[correct:])
    wide = max(math.fsum(masses[correct - i : correct]) / i for i in range(1, correct + 1))
    expected = min(1.0, exact + 2 * 400 * 1e-5 * wide)
    found = p_value(epsilon, canaries=400, guesses=guesses, correct=correct, delta=1e-5)
    assert found == pytest.approx(expected, rel=1e-9)


def test_bound_is_where_the_p_value_is_the_level() -> None:
    given = {"canaries": 400, "guesses": 80, "correct": 74, "delta": 1e-5}
    found = lower_bound(**given, confidence=0.9)  # type: ignore[arg-type]
    assert p_value(found, **given) == pytest.approx(0.1, rel=1e-6)  # type: ignore[arg-type]


def test_bound_is_monotone() -> None:
    def bound(correct: int = 70, delta: float = 1e-5, confidence: float = 0.95) -> float:
        return lower_bound(
            canaries=400, guesses=80, correct=correct, delta=delta, confidence=confidence
        )

    assert bound(0) == bound(40) == 0.0 < bound(60) < bound(70) < bound(80)
    assert bound(confidence=0.99) < bound(confidence=0.9)
    assert bound(delta=1e-3) < bound(delta=1e-5) < bound(delta=1e-9)
    assert bound(80, delta=0.5) == 0.0


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct"), [(10, 11, 3), (10, 5, 6), (0, 0, 0), (10, 5, -1)]
)
def test_impossible_counts_are_refused(canaries: int, guesses: int, correct: int) -> None:
    with pytest.raises(persample.UsageError):
        lower_bound(canaries=canaries, guesses=guesses, correct=correct, delta=1e-5)


# ------------------------------------------------------------------ guesses


def test_guesses_are_the_extreme_tenths() -> None:
    scores = torch.arange(20.0)[torch.randperm(20)]
    assert guess(scores, scores >= 10) == (4, 4)
    assert guess(scores, scores < 10) == (4, 0)
    middle = (scores >= 2) & (scores < 18)
    assert guess(scores, middle) == (4, 2)  # both high ones are out, both low ones are, too


def test_ties_are_broken_without_looking() -> None:
    included = torch.arange(10) < 5
    assert guess(torch.zeros(10), included) == guess(torch.ones(10), included)


BAD = [
    (torch.zeros(3), torch.zeros(3).bool()),
    (torch.zeros(20), torch.zeros(20)),
    (torch.zeros(20), torch.zeros(19).bool()),
    (torch.zeros(20, 1), torch.zeros(20, 1).bool()),
    (torch.full((20,), NAN), torch.zeros(20).bool()),
]


@pytest.mark.parametrize(("scores", "included"), BAD)
def test_bad_scores_are_refused(scores: Tensor, included: Tensor) -> None:
    with pytest.raises(persample.UsageError):
        guess(scores, included)


def convictions(epsilon: float, factor: float, runs: int) -> int:
    """Of runs of one Gaussian release whose noise is ``factor`` of what ε needs."""
    import dp_accounting

    scale = factor * dp_accounting.get_sigma_gaussian(epsilon, 1e-5)
    generator = torch.Generator().manual_seed(7)
    found = 0
    for _ in range(runs):
        included = torch.rand(400, generator=generator) < 0.5
        scores = included + scale * torch.randn(400, generator=generator)
        guesses, correct = guess(scores, included)
        found += lower_bound(canaries=400, guesses=guesses, correct=correct, delta=1e-5) > epsilon
    return found


def test_a_right_release_is_rarely_convicted_and_a_wrong_one_is() -> None:
    assert convictions(1.0, 1.0, runs=20) <= 3
    assert convictions(1.0, 0.1, runs=20) >= 19


# ------------------------------------------------------------------ data with canaries

FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda x, y: (x, y),
    "dict": lambda x, y: {"x": x, "y": y},
    "list of samples": lambda x, y: [*zip(x, y, strict=True)],
    "data set": lambda x, y: torch.utils.data.TensorDataset(x, y),
}


@pytest.mark.parametrize("form", FORMS)
def test_those_that_are_out_keep_their_place(form: str) -> None:
    x, y = torch.randn(5, 2), torch.arange(5)
    data, canaries = FORMS[form](x[:3], y[:3]), FORMS[form](x[3:], y[3:])
    mixed = Mixture(
        Samples(data, "data"),
        Samples(canaries, "canaries"),
        included=torch.tensor([False, True]),
        blank=None,
    )
    assert len(mixed) == 5
    for index in range(5):
        sample = mixed[index]
        first, second = sample.values() if isinstance(sample, dict) else sample
        assert second == index
        assert first.isnan().all() if index == 3 else torch.equal(first, x[index])


def test_a_sample_of_integers_needs_a_blank() -> None:
    with pytest.raises(persample.UsageError, match="cannot be blanked"):
        not_a_number((torch.arange(3), 1))
    mixed = Mixture(
        Samples(torch.arange(3), "data"),
        Samples(torch.arange(2), "canaries"),
        included=torch.tensor([False, True]),
        blank=lambda sample: sample - 100,
    )
    assert [int(mixed[index]) for index in range(5)] == [0, 1, 2, -100, 1]


@pytest.mark.parametrize("data", [3, (torch.ones(2), torch.ones(3)), iter([1])])
def test_what_is_no_data_is_refused(data: Any) -> None:
    with pytest.raises(persample.UsageError, match="must be a Dataset"):
        Samples(data, "data")


# ------------------------------------------------------------------ a whole training


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    found: Tensor = (model(x) * y).sum(1)
    return found


@dataclass
class ByHand:
    """DP-SGD in a few lines, with what an audit reads of a training."""

    data: Any
    plan: private.Plan
    factor: float = 1.0
    model: nn.Module = field(default_factory=lambda: nn.Linear(240, 1, bias=False))
    loss_fn: Any = losses_of

    def __iter__(self) -> Iterator[int]:
        batch = torch.utils.data.default_collate([self.data[i] for i in range(len(self.data))])
        (weight,) = self.model.parameters()
        for step in range(self.plan.steps):
            coins = torch.rand(len(self.data)) < self.plan.sample_rate
            with torch.no_grad():
                grads = batch[0] * batch[1]  # of a linear model's weighted output
                norms = grads.norm(dim=1, keepdim=True)
                clipped = grads * (self.plan.max_norm / norms).clamp(max=1)
                total = clipped.nan_to_num(0.0)[coins].sum(0, keepdim=True)
                noise = self.factor * self.plan.noise_std * torch.randn_like(total)
                assert self.plan.divisor is not None
                weight.grad = (total + noise) / self.plan.divisor
                weight -= 0.1 * weight.grad
            yield step + 1


def audited(factor: float = 1.0, **changes: Any) -> Audit:
    """200 canaries, each in a direction of its own, 20 ordinary samples."""
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "epsilon": 1.0, "delta": 1e-5, "size": 220, "batch_size": 220, "steps": 2, "max_norm": 1.0
    }  # fmt: skip
    plan = private.plan(**given | changes)
    directions = 3 * torch.eye(220, 240)
    x, y = directions, torch.ones(220, 1)
    return audit(
        lambda data: ByHand(data, plan, factor),
        (x[:20], y[:20]),
        (x[20:], y[20:]),
        delta=1e-5,
        generator=torch.Generator().manual_seed(1),
    )


def test_a_right_training_passes() -> None:
    found = audited()
    assert found.ok
    assert 0.99 <= found.claimed <= 1.0
    assert (len(found.scores), found.guesses) == (200, 40)
    assert 0 < int(found.included.sum()) < 200
    assert "not refuted" in str(found)


def test_a_tenth_of_the_noise_is_convicted() -> None:
    found = audited(0.1)
    assert not found.ok
    assert found.epsilon > 2 * found.claimed
    assert "REFUTED" in str(found)


def test_who_is_in_comes_from_the_operating_system() -> None:
    plan = private.plan(noise_multiplier=1.0, delta=1e-5, size=50, batch_size=50, steps=1)
    data, included = (torch.randn(10, 240), torch.ones(10, 1)), []
    for _ in range(2):
        torch.manual_seed(3)
        canaries = (torch.eye(40, 240), torch.ones(40, 1))
        found = audit(lambda given: ByHand(given, plan), data, canaries, delta=1e-5)
        included.append(found.included)
    assert not torch.equal(*included)


REFUSED: dict[str, dict[str, Any]] = {
    "users": {"plan": {"unit": "user"}},
    "no loss": {"loss_fn": None},
    "delta": {"delta": 2.0},
    "confidence": {"confidence": 1.0},
    "few canaries": {"canaries": 5},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    row = REFUSED[name]
    given: dict[str, Any] = {
        "noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 1.0, "divisor": 1, "steps": 1
    }  # fmt: skip
    plan = private.plan(**given | row.get("plan", {}))
    count = row.get("canaries", 20)
    with pytest.raises(persample.UsageError) as caught:
        audit(
            lambda data: ByHand(data, plan, loss_fn=row.get("loss_fn", losses_of)),
            (torch.randn(5, 240), torch.ones(5, 1)),
            (torch.randn(count, 240), torch.ones(count, 1)),
            delta=row.get("delta", 1e-5),
            confidence=row.get("confidence", 0.95),
        )
    assert caught.value.fix


@pytest.mark.parametrize(("factor", "ok"), [(1.0, True), (0.1, False)])
def test_with_the_training_of_this_package(factor: float, ok: bool) -> None:
    training_class = pytest.importorskip("persample.private.training").Training
    torch.manual_seed(0)
    plan = private.plan(epsilon=2.0, delta=1e-5, size=420, batch_size=420, steps=2)
    x, y = 3 * torch.eye(420, 440), torch.ones(420, 1)

    def make_training(data: Any) -> Any:
        model = nn.Linear(440, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = training_class(model, optimizer, data, plan, loss_fn=losses_of)
        training.noise.std *= factor
        return training

    found = audit(make_training, (x[:20], y[:20]), (x[20:], y[20:]), delta=1e-5)
    assert found.ok is ok
