"""The loop: sums as one sample at a time gives them, whatever the micro-batches; nothing twice."""

from __future__ import annotations

import math
import random
import sys
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import persample
from persample import private
from persample.private.contribution import clip
from persample.private.sampling import Sampler
from persample.private.sums import Sums
from persample.private.trial import synthetic
from persample.testing import oracle

from .programs import SIZE, data, finish, losses, net, parameters, planned, training

NAN = float("nan")


def sums_of(made: private.Training) -> list[dict[str, Tensor]]:
    """Every step's sums before noise."""
    found: list[dict[str, Tensor]] = []
    made.observer.summed = lambda step, sums: found.append(  # type: ignore[method-assign]
        {name: value.clone() for name, value in sums.items()}
    )
    return found


def expected_sum(
    model: nn.Module, batch: Any, rows: Tensor, clipping: str, bound: float = 1.0
) -> dict[str, Tensor]:
    """Σ clip(g) of some rows, one sample at a time, in float64."""
    twin = net(torch.float64)
    twin.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    x, y = batch[0].double(), batch[1]
    grads = oracle(twin, losses, (x[rows], y[rows]))
    total = {name: torch.zeros_like(g[0]) for name, g in grads.items()} if len(rows) else {}
    for i in range(len(rows)):
        mine = clip({name: g[i] for name, g in grads.items()}, bound, clipping)
        total = {name: total[name] + mine[name] for name in total}
    return total


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_sums_are_those_of_one_sample_at_a_time(clipping: str, micro_batch: int) -> None:
    made = training(plan=planned(clipping=clipping), micro_batch=micro_batch)
    sums = sums_of(made)
    for parts in made.batches():
        rows = made.sampler.drawn(parts.step)
        expected = expected_sum(made.model, data(), rows, clipping)
        for x, y in parts:
            with made.record() as tape:
                tape.backward(losses(made.model, (x, y)))
        made.step()
        for name, value in expected.items():
            torch.testing.assert_close(sums[-1][name].double(), value, atol=1e-5, rtol=1e-5)
    assert len(sums) == 6


def test_padded_micro_batches_have_one_shape_and_change_nothing() -> None:
    shapes = set()

    def watched(model: nn.Module, batch: Any) -> Tensor:
        shapes.add(tuple(batch[0].shape))
        return losses(model, batch)

    padded = finish(training(loss_fn=watched, pad=True))
    assert shapes == {(7, 5)}
    for p, q in zip(padded, finish(training()), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)


def test_micro_batches_change_nothing_but_rounding() -> None:
    few, many = finish(training(micro_batch=7)), finish(training(micro_batch=64))
    for p, q in zip(few, many, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)


def test_the_short_form_is_the_loop() -> None:
    short, long = training(), training()
    for parts in long.batches():
        for batch in parts:
            with long.record() as tape:
                tape.backward(losses(long.model, batch))
        long.step()
    assert all(map(torch.equal, finish(short), parameters(long.model)))


def test_a_step_is_yielded_after_its_update() -> None:
    made, before = training(), parameters(net())
    for step in made:
        assert step == made.steps == len(made.log)
        assert not any(map(torch.equal, before, made.model.parameters()))
        before = parameters(made.model)
    assert list(made) == []  # nothing is left


def test_epsilon_counts_steps_done() -> None:
    pytest.importorskip("dp_accounting")
    made = training()
    assert made.epsilon() == 0
    for step in made:
        if step == 3:
            break
    assert made.epsilon() == planned().epsilon(3)
    finish(made)
    assert made.epsilon() == planned().epsilon() > planned().epsilon(3)


class Items(Dataset[Any]):
    """A data set with nothing but len and []."""

    def __init__(self, size: int = SIZE) -> None:
        self.x, self.y = data(size)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


def named(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, (batch["x"], batch["y"]))


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def by_attribute(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, (batch.x, batch.y))


def stacked(items: list[Any]) -> Any:
    return torch.stack([x for x, _ in items]), torch.tensor([int(y) for _, y in items])


DATA = {
    "tensors": (data(), {}),
    "Dataset": (Items(), {}),
    "TensorDataset": (TensorDataset(*data()), {}),
    "list": ([Items()[k] for k in range(SIZE)], {}),
    "dictionary": (dict(zip("xy", data(), strict=True)), {"loss_fn": named}),
    "named tuple": (Pair(*data()), {"loss_fn": by_attribute}),
    "loader in order": (DataLoader(Items(), batch_size=3), {}),
    "loader with a collate": (DataLoader(Items(), batch_size=3, collate_fn=stacked), {}),
    "collate": (Items(), {"collate": stacked}),
    "tensors and collate": (data(), {"collate": stacked}),
    "workers": (Items(), {"num_workers": 2}),
}


@pytest.mark.parametrize("name", DATA)
def test_data(name: str) -> None:
    given, options = DATA[name]
    expected = finish(training())
    assert all(map(torch.equal, finish(training(given=given, **options)), expected))


def test_one_tensor() -> None:
    x = data()[0]
    made = training(given=x, loss_fn=lambda m, b: m(b).square().sum(1))
    assert len(finish(made)) == 4


class Augmented(Items):
    """Adds numbers that it draws itself."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index] + torch.randn(5) + random.random(), int(self.y[index])


def test_workers_draw_the_same_after_a_resume() -> None:
    def made() -> private.Training:
        return training(given=Augmented(), num_workers=2)

    expected, one, two = finish(made()), made(), made()
    for step in one:
        if step == 2:
            break
    two.load_state_dict(one.state_dict())
    assert all(map(torch.equal, finish(two), expected))


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.AdamW])
def test_any_optimizer_and_scheduler(optimizer: Any) -> None:
    model = net()
    made_optimizer = optimizer(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made_optimizer, 6)
    made = private.Training(
        model, made_optimizer, data(), planned(), losses, scheduler=scheduler, verify=False
    )
    finish(made)
    assert scheduler.last_epoch == 6
    assert [entry["lr"][0] for entry in made.log] == pytest.approx(
        [0.05 * (1 + math.cos(math.pi * k / 6)) for k in range(6)]
    )


def test_a_sample_that_is_not_finite_contributes_zero_in_silence() -> None:
    x, y = data()
    x[:20] = NAN
    x[20] = math.inf
    made = training(given=(x, y), plan=planned(sample_rate=1.0, batch_size=None, divisor=10.0))
    sums = sums_of(made)
    rows = torch.arange(21, SIZE)
    expected = expected_sum(made.model, data(), rows, "flat")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in made:
            break
    assert not told
    for name, value in expected.items():
        torch.testing.assert_close(sums[0][name].double(), value, atol=1e-5, rtol=1e-5)


def test_unsafe_tells() -> None:
    x, y = data()
    x[:] = NAN
    made = training(given=(x, y), unsafe=True)
    with pytest.warns(persample.NonFiniteWarning):
        finish(made)
    assert made.log[0]["drawn"] == len(made.sampler.drawn(0))


def test_the_log_holds_what_is_public() -> None:
    made = training()
    finish(made)
    assert [entry["step"] for entry in made.log] == [1, 2, 3, 4, 5, 6]
    assert {name for entry in made.log for name in entry} == {"step", "lr"}


@pytest.mark.parametrize("shown", [True, False])
def test_a_progress_bar_on_a_terminal_only(
    shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: shown)
    finish(training())
    told = capsys.readouterr().err
    assert ("6/6" in told) is shown


def test_dropout_is_that_of_the_plain_program() -> None:
    made = training(net(dropout=0.5))
    torch.manual_seed(0)
    finish(made)
    with_noise = torch.get_rng_state()
    torch.manual_seed(0)
    model = net(dropout=0.5)
    for step in range(6):
        for part in made.units.parts(step, made.sampler.drawn(step)):
            model(data()[0][part.rows])
    assert torch.equal(with_noise, torch.get_rng_state())


# ---------------------------------------------------------------------- order of calls


def record(made: private.Training, batch: Any) -> None:
    with made.record() as tape:
        tape.backward(losses(made.model, batch))


def skipped_part(made: private.Training) -> None:
    for parts in made.batches():
        for number, batch in enumerate(parts):
            if number:
                record(made, batch)


def unread_part(made: private.Training) -> None:
    for parts in made.batches():
        for batch in parts:
            record(made, batch)
            break
        made.step()


def part_recorded_twice(made: private.Training) -> None:
    for parts in made.batches():
        for batch in parts:
            record(made, batch)
            record(made, batch)


def parts_read_twice(made: private.Training) -> None:
    for parts in made.batches():
        for batch in parts:
            record(made, batch)
        for batch in parts:
            record(made, batch)


def parts_read_at_once(made: private.Training) -> None:
    for parts in made.batches():
        for batch in list(parts):
            record(made, batch)


def no_step(made: private.Training) -> None:
    for parts in made.batches():
        for batch in parts:
            record(made, batch)


def step_twice(made: private.Training) -> None:
    for parts in made.batches():
        for batch in parts:
            record(made, batch)
        made.step()
        made.step()


def step_first(made: private.Training) -> None:
    made.step()


def record_first(made: private.Training) -> None:
    record(made, data())


def too_many_steps(made: private.Training) -> None:
    finish(made)
    made.step()


def other_data(made: private.Training) -> None:
    for parts in made.batches():
        for _ in parts:
            record(made, data(3))


def no_backward(made: private.Training) -> None:
    for parts in made.batches():
        for batch in parts:
            with made.record():
                losses(made.model, batch)


def closure(made: private.Training) -> None:
    for _ in made.batches():
        made.step(lambda: torch.zeros(()))  # type: ignore[arg-type]


ORDER = [
    skipped_part, unread_part, part_recorded_twice, parts_read_twice, parts_read_at_once, no_step,
    step_twice, step_first, record_first, too_many_steps, other_data, no_backward, closure,
]  # fmt: skip


@pytest.mark.parametrize("program", ORDER)
def test_a_part_is_recorded_once_and_a_batch_is_a_step(program: Any) -> None:
    made = training(micro_batch=3)
    with pytest.raises(persample.UsageError) as caught:
        program(made)
    assert caught.value.fix
    assert made.steps == (1 if program is step_twice else 6 if program is too_many_steps else 0)


def test_a_batch_that_was_left_is_drawn_again() -> None:
    made, expected = training(), finish(training())
    for parts in made.batches():
        for batch in parts:
            record(made, batch)
            break
        break
    assert all(map(torch.equal, finish(made), expected))


def test_an_exception_in_the_model_loses_nothing() -> None:
    made, expected = training(), finish(training())
    calls = []

    def failing(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return losses(model, batch)

    made.loss_fn = failing
    with pytest.raises(KeyboardInterrupt):
        finish(made)
    assert all(map(torch.equal, finish(made), expected))


def test_an_update_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = training()
    with monkeypatch.context() as patched:
        patched.setattr(made.optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            finish(made)
    assert made.steps == 1
    steps = list(made)
    assert steps == [2, 3, 4, 5, 6]
    assert made.noise.draws == 6


def test_gradients_are_written_to_every_trainable_parameter() -> None:
    made = training()
    for parameter in made.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e9)  # of before: it must not be added to
    for _ in made:
        assert all(float(p.grad.abs().max()) < 10 for p in made.model.parameters())  # type: ignore[union-attr]


def test_an_old_gradient_of_a_frozen_parameter_moves_nothing() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[0].requires_grad_(False)
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)  # of a plain step before
    before = parameters(model)[:2]
    finish(private.Training(model, optimizer, data(), planned(), losses, verify=False))
    assert all(map(torch.equal, parameters(model)[:2], before))


def test_the_statement_is_of_the_steps_done() -> None:
    made = training()
    for step in made:
        if step == 2:
            break
    assert "2 of 6 planned" in made.statement()


class Named(dict[str, Tensor]):
    """A dictionary of a class of its own, as tokenizers give."""


@pytest.mark.parametrize("kind", [dict, Named, list, tuple])
def test_synthetic_rows_hold_no_data(kind: Any) -> None:
    x, y = data()
    batch = kind({"x": x, "y": y}) if issubclass(kind, dict) else kind([x, y])
    made = synthetic(batch, SIZE, torch.Generator().manual_seed(0))
    assert type(made) is kind
    first, second = made.values() if issubclass(kind, dict) else made
    assert (first.shape, second.shape) == ((4, 5), (4,))
    assert not bool(torch.isin(first, x).any())
    assert set(second.tolist()) <= {0, 1}
    with pytest.raises(TypeError):
        synthetic([x, ["a text"] * SIZE], SIZE, torch.Generator())


def test_verification_draws_nothing_from_the_global_generator() -> None:
    found = []
    for verify in (True, False):
        torch.manual_seed(4)
        found.append(finish(training(net(dropout=0.5), verify=verify)))
    assert all(map(torch.equal, *found))


def test_parameters_may_be_frozen_between_steps() -> None:
    made, before = training(), None
    for step in made:
        if step == 3:
            made.model[0].requires_grad_(False)
            made.optimizer.param_groups[0]["params"] = list(made.model[3].parameters())
            before = parameters(made.model)
    assert before is not None
    after = parameters(made.model)
    assert [torch.equal(p, q) for p, q in zip(before, after, strict=True)] == [True] * 2 + [
        False
    ] * 2


def test_the_first_step_is_verified_on_synthetic_rows() -> None:
    seen = []

    def watched(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[0].detach().clone())
        return losses(model, batch)

    made = training(loss_fn=watched, verify=True)
    torch.manual_seed(3)
    finish(made)
    assert made.verified == "passed"
    rows = {tuple(row.tolist()) for row in data()[0]}
    verified = [x for x in seen if len(x) == 4 and tuple(x[0].tolist()) not in rows]
    assert len(verified) > 3  # a few passes, and none of them on data
    assert all(map(torch.equal, finish(training(loss_fn=watched, verify=True)), finish(training())))


def test_losses_of_several_positions() -> None:
    def by_position(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), torch.ones(len(batch[0]), 3), reduction="none")

    made = training(loss_fn=by_position)
    sums = sums_of(made)
    finish(made)
    assert len(sums) == 6


def test_options_reach_the_recording() -> None:
    expected = finish(training())
    for p, q in zip(finish(training(options={"lean": True})), expected, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_frozen_or_unfrozen_between_batch_and_step_stays(trained: bool) -> None:
    model = net()
    model[0].requires_grad_(not trained)
    before = parameters(model)[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = private.Training(model, optimizer, data(), planned(), losses, verify=False)
    for parts in made.batches():
        for batch in parts:
            record(made, batch)
        model[0].requires_grad_(trained)
        made.step()
        break
    assert torch.equal(parameters(model)[0], before)  # no gradient, and no noise, of that step
    assert made.steps == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last(dtype: torch.dtype) -> None:
    found = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        x = torch.randn(SIZE, 3, 4, 4).to(dtype)
        made = training(model.to(dtype).to(memory_format=form), (x, data()[1]))
        found.append(finish(made))
    for plain, last in zip(*found, strict=True):
        assert (plain - last).abs().max() < (1e-6 if dtype == torch.float32 else 1e-2)


def test_sums_are_nobody_elses() -> None:
    whole = torch.zeros(2, 3)
    for value in (whole[0], whole.T, torch.zeros(3, 2)):
        sums = Sums({"w": torch.zeros(value.shape)})
        sums.add({"w": value})
        sums.add({"w": torch.ones(value.shape)})
        assert sums.total()["w"].is_contiguous()
        assert torch.equal(whole, torch.zeros(2, 3))


def test_two_sums_never_share_memory() -> None:
    """Noise would be added twice to the one, and not independently."""
    shared = torch.ones(3)
    sums = Sums({"a": torch.zeros(3), "b": torch.zeros(3)})
    sums.add({"a": shared, "b": shared.view(3)})
    sums.total()["a"].add_(1)
    assert sums.total()["b"].tolist() == [1.0, 1.0, 1.0]


def test_large_sums_are_taken_over_without_a_copy() -> None:
    for value in (torch.ones(2, 3), torch.ones(6).view(2, 3)):
        sums = Sums({"w": torch.zeros(2, 3)})
        sums.add({"w": value})
        assert sums.total()["w"].data_ptr() == value.data_ptr()


def test_a_batch_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coins cost time for every record of the data, and loading needs the same ones."""
    drawn: list[int] = []
    draw = Sampler.drawn

    def counted(sampler: Sampler, step: int) -> Tensor:
        drawn.append(step)
        return draw(sampler, step)

    monkeypatch.setattr(Sampler, "drawn", counted)
    finish(training())
    assert len(drawn) == len(set(drawn))
