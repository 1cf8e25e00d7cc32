"""Noise: once a step, of the stated scale, for every parameter, keyed by a secret."""

from __future__ import annotations

import hashlib
import math
import sys
from typing import Any

import pytest
import scipy.stats
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor, nn

import persample
from persample import private
from persample.errors import UsageError
from persample.private import banded, keys
from persample.private.keys import Bits
from persample.private.noise import Noise, Normal, polar

from .programs import SIZE, data, finish, net, planned, training

SECRET = bytes(range(32))


class Released:
    """Released gradients minus sums, over the steps of a training."""

    def __init__(self, made: private.Training) -> None:
        self.values: list[Tensor] = []
        self._sums: dict[str, Tensor] = {}
        observer = made.observer
        observer.summed = self._summed  # type: ignore[method-assign]
        observer.released = self._released  # type: ignore[method-assign]

    def _summed(self, step: int, sums: dict[str, Tensor]) -> None:
        self._sums = {name: value.clone() for name, value in sums.items()}

    def _released(self, step: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        divisor = 10.0
        self.values += [(g - self._sums[name] / divisor).flatten() for name, g in grads.items()]
        return grads


def wide_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 3))


def ratio(parts: int, kind: type[private.Training] = private.Training, **options: Any) -> float:
    """Measured variance over the stated one, in units of the χ² deviation from 1."""
    size = -(-SIZE // parts)
    plan = planned(
        sample_rate=1.0, batch_size=None, divisor=10.0, noise_multiplier=0.7, max_norm=3.0
    )
    made = training(wide_net(), data(), plan, kind=kind, micro_batch=size,
                    noise_generator=None, **options)  # fmt: skip
    assert len(made.parts(0)) == parts
    released = Released(made)
    finish(made)
    found = torch.cat(released.values).double()
    variance = float(found.square().mean()) / (0.7 * 3.0 / 10.0) ** 2
    return (variance - 1) / math.sqrt(2 / len(found))


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_measured_variance(parts: int) -> None:
    assert abs(ratio(parts)) < 5


class Louder(private.Training):
    """Noise that is wrong by a factor."""

    factor = 1.5**0.5

    def released(self, batch: Any, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        self.noise.std = self.plan.noise_std * self.factor
        return super().released(batch, sums)


class PerPart(private.Training):
    """Noise in every micro-batch."""

    def clipped(self, tape: Any, part: Any) -> dict[str, Tensor]:
        found = super().clipped(tape, part)
        noise = Noise(secret=keys.fresh(), std=self.plan.noise_std)
        noise.add(part.number, found)
        return found

    def released(self, batch: Any, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: total / self.plan.divisor for name, total in sums.items()}


def test_a_variance_wrong_by_half_is_found() -> None:
    assert ratio(3, Louder) > 20

    class Quieter(Louder):
        factor = 1.5**-0.5

    assert ratio(3, Quieter) < -20


def test_noise_per_micro_batch_is_found() -> None:
    """The sum already holds noise; what is added later is none."""
    assert ratio(3, PerPart) < -20


def test_noise_is_drawn_once_a_step() -> None:
    made = training()
    for step in made:
        assert made.noise.draws == step


def test_the_global_seed_decides_nothing() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        made = training(noise_generator=None, sample_generator=None)
        found.append((made.noise.secret, made.sampler.secret))
    assert len({secret for pair in found for secret in pair}) == 4
    before = torch.get_rng_state()
    finish(training(noise_generator=None))
    assert torch.equal(before, torch.get_rng_state())  # no number of it was used either


def test_the_same_key_gives_the_same_noise_and_another_step_does_not() -> None:
    def drawn(step: int, secret: bytes = SECRET) -> Tensor:
        made = {"w": torch.zeros(50)}
        Noise(secret=secret, std=1.0).add(step, made)
        return made["w"]

    assert torch.equal(drawn(1), drawn(1))
    assert not bool((drawn(1) == drawn(2)).any())
    assert not bool((drawn(1) == drawn(1, bytes(32))).any())


def test_no_number_comes_twice() -> None:
    total = {"a": torch.zeros(200_001), "b": torch.zeros(70_000), "c": torch.zeros(())}
    Noise(secret=SECRET, std=1.0).add(0, total)
    found = torch.cat([value.flatten() for value in total.values()]).double()
    count = len(found)
    # blocks of one buffer: none may repeat another
    for shift in (1, 2, 1 << 17, 1 << 18, 200_001):
        product = (found[shift:] * found[: count - shift]).mean()
        assert abs(float(product)) < 5 / math.sqrt(count - shift)
    assert abs(float(found.square().mean()) - 1) < 5 * math.sqrt(2 / count)
    assert abs(float(found.pow(4).mean()) - 3) < 5 * math.sqrt(96 / count)


def test_sizes_of_parameters_move_nobodys_noise() -> None:
    whole = torch.zeros(300_000)
    Normal(SECRET, 0, 300_000).add_to(whole, 1.0)
    cuts = (1, 0, 7, 1000, 262_000, 36_992)
    assert sum(cuts) == 300_000
    source, parts = Normal(SECRET, 0, 300_000), []
    for count in cuts:
        parts.append(torch.zeros(count))
        source.add_to(parts[-1], 1.0)
    assert torch.equal(torch.cat(parts), whole)


def test_parameters_do_not_share_noise() -> None:
    sums = {"a": torch.zeros(50), "b": torch.zeros(50)}
    Noise(secret=SECRET, std=1.0).add(0, sums)
    assert not bool((sums["a"] == sums["b"]).any())


def test_bits_are_those_of_aes_under_a_key_of_secret_purpose_and_step() -> None:
    found = [Bits(SECRET, "noise", step).draw(1000, torch.int64).clone() for step in (3, 3, 4)]
    assert torch.equal(found[0], found[1])
    assert not bool((found[0] == found[2]).any())
    assert not bool((Bits(SECRET, "other", 3).draw(1000, torch.int64) == found[0]).any())
    key = hashlib.shake_256(
        b"\x20\0\0\0" + SECRET + b"\x05\0\0\0noise" + (3).to_bytes(8, "little")
    ).digest(32)
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8000))
    assert bytes(found[0].numpy().tobytes()) == stream


def test_bits_go_on_where_they_were() -> None:
    whole, parts = Bits(SECRET, "noise", 0), Bits(SECRET, "noise", 0)
    drawn = [parts.draw(count, torch.int32).clone() for count in (1, 700, 3, 1000)]
    assert torch.equal(torch.cat(drawn), whole.draw(1704, torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_noise_is_normal(dtype: torch.dtype) -> None:
    found = torch.zeros(1_000_001, dtype=dtype)
    Normal(SECRET, 0, len(found)).add_to(found, 2.0)
    numbers, count = (found.double() / 2).numpy(), len(found)
    assert scipy.stats.kstest(numbers, "norm").pvalue > 1e-4
    for size in (3.0, 4.0, 4.5):  # tails
        expected = 2 * scipy.stats.norm.sf(size) * count
        assert abs((abs(numbers) > size).sum() - expected) < 5 * math.sqrt(expected)
    half = 1 << 17  # radius and angle of one pair are in both halves of a block
    for one, two in ((numbers[:half], numbers[half : 2 * half]), (numbers[:-1], numbers[1:])):
        for power in (1, 2):
            related = scipy.stats.pearsonr(one**power, two**power).statistic
            assert abs(related) < 5 / math.sqrt(len(one))


def test_extreme_integers_are_finite() -> None:
    for kind, dtype in ((torch.int32, torch.float32), (torch.int64, torch.float64)):
        ends = torch.iinfo(kind)
        first = torch.tensor([ends.min, ends.max, 0, 1, -1], dtype=kind)
        bits = torch.stack([first, first.flip(0)])
        radius, angle = polar(bits, torch.empty(2, 5, dtype=dtype))
        assert bool(torch.isfinite(radius).all())
        assert float(radius[0]) == 0
        assert float(radius.max()) > (6.6 if kind is torch.int32 else 9.4)
        assert float(angle.abs().max()) <= math.pi * (1 + 1e-6)


def test_without_cryptography_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(UsageError, match=r"needs cryptography.*\n.*\n.*persample\[private\]"):
        Normal(SECRET, 0, 1)


def test_a_bfloat16_model_has_float32_noise() -> None:
    made = training(net(torch.bfloat16), data(dtype=torch.bfloat16))
    seen: list[torch.dtype] = []
    made.observer.released = lambda step, grads: (  # type: ignore[method-assign]
        seen.extend(g.dtype for g in grads.values()) or grads
    )
    for _ in made:
        break
    assert set(seen) == {torch.float32}
    assert {p.grad.dtype for p in made.model.parameters() if p.grad is not None} == {torch.bfloat16}


def test_both_coordinates_of_a_complex_number_get_the_noise() -> None:
    sums = {"w": torch.zeros(20_000, dtype=torch.complex64)}
    Noise(secret=SECRET, std=2.0).add(0, sums)
    parts = torch.view_as_real(sums["w"]).double()
    assert bool(((parts.square().mean(0) / 4 - 1).abs() < 5 * math.sqrt(2 / 20_000)).all())
    assert abs(float(parts.prod(1).mean()) / 4) < 5 / math.sqrt(20_000)


class Idle(nn.Module):
    """A parameter that is never used, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = net(), nn.Parameter(torch.zeros(1000))
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_unused_parameters_get_noise_and_frozen_ones_none() -> None:
    made = training(Idle())
    for _ in made:
        break
    grad = made.model.unused.grad
    assert isinstance(grad, Tensor)
    assert abs(float(grad.square().mean()) * 100 - 1) < 5 * math.sqrt(2 / 1000)
    assert made.model.frozen.grad is None


def test_an_empty_batch_is_a_step_of_noise_alone() -> None:
    def never(model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError("the model was called")

    plan = planned(sample_rate=1e-12, batch_size=None, divisor=10.0)
    made = training(plan=plan, loss_fn=never)
    before = [p.detach().clone() for p in made.model.parameters()]
    sizes = []
    for parts in made.batches():
        sizes.append(len(parts))
        made.step()
    assert sizes == [0] * 6
    assert made.steps == 6
    moved = zip(before, made.model.parameters(), strict=True)
    assert all(bool((p != q).all()) for p, q in moved)


def test_banded_noise_solves_its_recurrence() -> None:
    made, rows, white = Noise(secret=SECRET, std=1.5, bands=3), [], []
    for step in range(7):
        sums = {"w": torch.zeros(6, dtype=torch.float64)}
        made.add(step, sums)
        rows.append(sums["w"].clone())
        white.append(torch.zeros(6, dtype=torch.float64))
        Normal(SECRET, step, 6).add_to(white[-1], 1.5)
    c = banded.coefficients(3)
    strategy = torch.zeros(7, 7, dtype=torch.float64)
    for i in range(7):
        for k in range(min(3, i + 1)):
            strategy[i, i - k] = c[k]
    torch.testing.assert_close(strategy @ torch.stack(rows), torch.stack(white))


def test_banded_noise_goes_on_after_a_step_that_was_not_finished() -> None:
    whole, broken = (Noise(secret=SECRET, std=1.0, bands=3) for _ in range(2))
    for step in range(5):
        expected, found = {"w": torch.zeros(6)}, {"w": torch.zeros(6)}
        whole.add(step, expected)
        if step != 2:
            broken.add(step, found)
            torch.testing.assert_close(found["w"], expected["w"])


def test_a_secret_of_the_global_generator_is_refused() -> None:
    with pytest.raises(persample.UsageError, match="global generator"):
        training(noise_generator=torch.default_generator)
