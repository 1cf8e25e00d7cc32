"""Replay: right trainings pass, each planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample import private
from persample.private.noise import Noise

from .programs import SIZE, data, losses, net, planned, training
from .test_training import Items


def made_by(**options: Any) -> Callable[[Any], private.Training]:
    """make_training of the tests; secrets are the operating system's."""

    def make(given: Any) -> private.Training:
        known: dict[str, Any] = {"noise_generator": None, "sample_generator": None}
        model = options.get("model", net)()
        return training(model, given, **known | {k: v for k, v in options.items() if k != "model"})

    return make


RIGHT: dict[str, dict[str, Any]] = {
    "flat": {},
    "automatic": {"plan": planned(clipping="automatic")},
    "per layer": {"plan": planned(clipping="per_layer")},
    "dropout": {"model": lambda: net(dropout=0.4)},
    "a large bound": {"plan": planned(max_norm=50.0)},
    "a small bound": {"plan": planned(max_norm=1e-3)},
    "one micro-batch": {"micro_batch": 64},
    "one sample at a time": {"micro_batch": 1},
    "lean": {"options": {"lean": True}},
    "correlated noise": {"plan": planned(bands=3)},
    "padded": {"pad": True},
    "a cap": {"plan": planned(cap=39)},
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_trainings_pass(name: str) -> None:
    report = private.replay(made_by(**RIGHT[name]), data(), remove=[17, 3])
    assert report.ok, str(report)
    assert bool(report)
    assert len(report.compared) == 6


DATA: dict[str, Any] = {
    "Dataset": Items(),
    "dictionary": dict(zip("xy", data(), strict=True)),
    "loader": torch.utils.data.DataLoader(Items(), batch_size=4),
}


@pytest.mark.parametrize("name", DATA)
def test_other_data(name: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, (batch["x"], batch["y"]) if isinstance(batch, dict) else batch)

    report = private.replay(made_by(loss_fn=loss), DATA[name], remove=17)
    assert report.ok, str(report)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38, 1e20, 1e5, 1e-30, 0.0])
def test_adversarial_samples(value: float) -> None:
    x, y = data()
    x[17] = value
    report = private.replay(made_by(), (x, y), remove=[17, 18])
    assert report.ok, str(report)


def test_numbers_are_drawn_from_nowhere_else() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    private.replay(made_by(), data(), remove=17)
    assert torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------------- planted faults


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """A mean over the micro-batch, spread over its samples: gradients are n times smaller."""
    return losses(model, batch) / len(batch[0])


class ByRealBatch(private.Training):
    """Divides by the number of samples that were drawn."""

    def released(self, batch: Any, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        self.noise.add(batch.step, sums)
        count = sum(len(part.units) for part in batch.parts)
        return {name: total / count for name, total in sums.items()}


def unclipped(made: private.Training, tape: persample.Tape, part: Any) -> dict[str, Tensor]:
    weights = made.weights(part)
    return tape.weighted_sum(torch.ones(tape.n) if weights is None else weights)


class ClipAfterSum(private.Training):
    """Clips the sum of a micro-batch."""

    def clipped(self, tape: persample.Tape, part: Any) -> dict[str, Tensor]:
        total = unclipped(self, tape, part)
        size = torch.stack([g.square().sum() for g in total.values()]).sum().sqrt()
        factor = (self.plan.max_norm / size).clamp(max=1)
        return {name: g * factor for name, g in total.items()}


class Unclipped(private.Training):
    """Clips nothing."""

    def clipped(self, tape: persample.Tape, part: Any) -> dict[str, Tensor]:
        return unclipped(self, tape, part)


class NoisePerPart(private.Training):
    """Adds noise to every micro-batch."""

    def clipped(self, tape: persample.Tape, part: Any) -> dict[str, Tensor]:
        found = super().clipped(tape, part)
        self.noise.add(part.number, found)
        return found


class NoiseTwice(private.Training):
    """Adds noise once more."""

    def released(self, batch: Any, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        self.noise.add(batch.step + 100, sums)
        return super().released(batch, sums)


class NoNoise(private.Training):
    """Forgets it."""

    def released(self, batch: Any, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: total / self.plan.divisor for name, total in sums.items()}


class HalfTheNoise(private.Training):
    """Uses σ instead of σC, here: half of it."""

    def released(self, batch: Any, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        self.noise.std = self.plan.noise_std / 2
        return super().released(batch, sums)


class GlobalSeed(private.Training):
    """Draws noise from torch's global generator."""

    def released(self, batch: Any, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        self.noise.draws += 1
        for total in sums.values():
            total.add_(torch.randn_like(total), alpha=self.plan.noise_std)
        return {name: total / self.plan.divisor for name, total in sums.items()}


class Shuffling(private.Training):
    """Takes the next ten of a shuffled order."""

    def parts(self, step: int) -> list[Any]:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(step // 4))
        drawn = order[step % 4 * 10 :][:10].sort().values
        return self.units.parts(step, self.observer.drawn(step, drawn))


class SameNoise(private.Training):
    """The noise of the first step in every step."""

    def released(self, batch: Any, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        self.noise.add(0, sums)
        return {name: total / self.plan.divisor for name, total in sums.items()}


def mixing(items: list[Any]) -> Any:
    """A collate that subtracts the mean of the batch."""
    x = torch.stack([x for x, _ in items])
    return x - x.mean(0), torch.tensor([y for _, y in items])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "mean loss": ({"loss_fn": mean_loss}, ""),
    "divisor by the real batch": ({"kind": ByRealBatch}, "divisor"),
    "clip after the sum": ({"kind": ClipAfterSum}, ""),
    "no clipping": ({"kind": Unclipped, "plan": planned(max_norm=0.1)}, ""),
    "noise per micro-batch": ({"kind": NoisePerPart}, "times in a step"),
    "noise twice": ({"kind": NoiseTwice}, "times in a step"),
    "no noise": ({"kind": NoNoise}, "0 times"),
    "half the noise": ({"kind": HalfTheNoise}, "what is released"),
    "noise from the global seed": ({"kind": GlobalSeed}, "what is released"),
    "the same noise": ({"kind": SameNoise}, "what is released"),
    "a shuffling sampler": ({"kind": Shuffling}, "Poisson"),
    "a collate that mixes samples": ({"collate": mixing}, ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_planted_faults_are_found(name: str) -> None:
    options, words = WRONG[name]
    report = private.replay(made_by(**options), Items(), remove=17)
    assert not report.ok, str(report)
    assert words in str(report)
    assert "FAILED" in str(report)


def test_the_bound_alone_would_miss_a_mean_loss() -> None:
    """Why the criterion is equality: what a removed sample moves stays below C."""
    report = private.replay(made_by(loss_fn=mean_loss), data(), remove=17)
    assert all(c.contribution <= 1 + 1e-6 for c in report.compared)
    assert max(c.dropped for c in report.compared) > 0.1


# ---------------------------------------------------------------------- functions of indices


def gradients(indices: Tensor) -> Tensor:
    model = net()
    x, y = data()
    with persample.record(model) as tape:
        tape.backward(F.cross_entropy(model(x[indices]), y[indices], reduction="none"))
    return torch.cat([g.flatten(1) for g in tape.grads().values()], 1)


def clipped_rows(indices: Tensor) -> Tensor:
    g = gradients(indices)
    return (g / g.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0)


def in_parts(indices: Tensor) -> list[Tensor]:
    return list(sum(clipped_rows(part) for part in indices.split(4)).split(20))


def by_name(indices: Tensor) -> dict[str, Tensor]:
    return {"all": clipped_rows(indices)}


FUNCTIONS = [clipped_rows, in_parts, by_name]


@pytest.mark.parametrize("step", FUNCTIONS)
def test_a_right_function_passes(step: Any) -> None:
    report = private.replay(step, data()[0], remove=[17, 5], max_norm=1.0)
    assert report.ok, str(report)
    assert private.replay(step, SIZE, remove=17, max_norm=1.0).ok


def mean_of_rows(indices: Tensor) -> Tensor:
    g = gradients(indices) / len(indices)
    return (g / g.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0)


def clip_of_the_sum(indices: Tensor) -> Tensor:
    g = gradients(indices).sum(0)
    return g / g.norm().clamp(min=1.0)


def clip_per_part(indices: Tensor) -> Tensor:
    return sum((clip_of_the_sum(part) for part in indices.split(4)), torch.zeros(75))


def not_clipped(indices: Tensor) -> Tensor:
    return gradients(indices).sum(0)


def divided(indices: Tensor) -> Tensor:
    return clipped_rows(indices) / len(indices)


def centred(indices: Tensor) -> Tensor:
    g = gradients(indices)
    g = g - g.mean(0)
    return (g / g.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0)


@pytest.mark.parametrize(
    "step", [mean_of_rows, clip_of_the_sum, clip_per_part, not_clipped, divided, centred]
)
def test_a_wrong_function_is_found(step: Any) -> None:
    bound = 0.5 if step is not_clipped else 1.0
    report = private.replay(step, data()[0], remove=17, max_norm=bound)
    assert not report.ok, str(report)


# ---------------------------------------------------------------------- bad input


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no function": (lambda: private.replay(3, data(), remove=1), "function"),  # type: ignore[arg-type]
    "no training": (lambda: private.replay(lambda d: 3, data(), remove=1), "Training"),
    "no loss_fn": (
        lambda: private.replay(made_by(loss_fn=None), data(), remove=1), "loss_fn"
    ),
    "beyond the data": (lambda: private.replay(made_by(), data(), remove=40), "40 records"),
    "negative": (lambda: private.replay(made_by(), data(), remove=-1), "remove"),
    "no steps": (lambda: private.replay(made_by(), data(), remove=1, steps=0), "steps"),
    "no sum": (
        lambda: private.replay(lambda i: 3.0, data()[0], remove=1, max_norm=1.0), "sum before noise"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    run, words = BAD[name]
    with pytest.raises((persample.UsageError, TypeError)) as caught:
        run()
    assert words in str(caught.value)


def test_the_report_is_a_small_table() -> None:
    text = str(private.replay(made_by(), data(), remove=17))
    lines = text.splitlines()
    assert lines[0].startswith("replay: passed, 3 comparisons")
    assert len(lines) == 5
    assert max(map(len, lines)) <= 100


def test_noise_of_the_reference_is_that_of_the_training() -> None:
    made = training()
    sums = {"w": torch.zeros(3)}
    Noise(secret=made.noise.secret, std=made.plan.noise_std).add(0, sums)
    other = {"w": torch.zeros(3)}
    made.noise.add(0, other)
    assert torch.equal(sums["w"], other["w"])
