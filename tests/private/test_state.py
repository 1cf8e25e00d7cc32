"""Checkpoints: bit for bit, of this plan, data and optimizer alone, and never half of one."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import persample
from persample import private
from persample.private import state

from .programs import data, finish, losses, net, parameters, planned, seeded, training

SCHEDULERS: dict[str, Any] = {
    "none": lambda optimizer: None,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=7),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1)),
    "another lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 2)),
    "one after the other": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [2],
    ),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
}


def made(
    optimizer: str = "adam",
    scheduler: str = "cosine",
    plan: private.Plan | None = None,
    model: nn.Module | None = None,
    **options: Any,
) -> private.Training:
    model = net(dropout=0.3) if model is None else model
    chosen = OPTIMIZERS[optimizer](model.parameters())
    known: dict[str, Any] = {"micro_batch": 7, "verify": False}
    return private.Training(
        model, chosen, data(), plan or planned(), losses,
        scheduler=SCHEDULERS[scheduler](chosen), **known | options,
    )  # fmt: skip


def after(training: private.Training, steps: int) -> private.Training:
    for step in training:
        if step == steps:
            break
    return training


@pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler:UserWarning")
@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [*(("adam", s) for s in SCHEDULERS), *((o, "cosine") for o in OPTIMIZERS if o != "adam")],
)
def test_resume_is_bit_for_bit(optimizer: str, scheduler: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    first = after(made(optimizer, scheduler), 3)
    first.save(tmp_path / "state.pt")
    expected, numbers = finish(first), torch.get_rng_state()
    torch.manual_seed(99)
    second = made(optimizer, scheduler)
    with torch.no_grad():
        second.model[0].weight.zero_()
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.steps == 3
    assert all(map(torch.equal, finish(second), expected))
    assert torch.equal(numbers, torch.get_rng_state())
    assert [e["lr"] for e in second.log] == [e["lr"] for e in first.log[3:]]


def test_banded_noise_resumes(tmp_path: Path) -> None:
    plan = planned(bands=3)
    first = after(training(plan=plan), 3)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    expected = finish(first)
    second = training(plan=plan, noise_generator=None, sample_generator=None)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert all(map(torch.equal, finish(second), expected))


def test_a_checkpoint_is_a_snapshot() -> None:
    first = after(training(), 3)
    found = first.state_dict()
    expected = parameters(first.model)
    finish(first)
    second = training()
    second.load_state_dict(found)
    assert all(map(torch.equal, parameters(second.model), expected))
    finish(second)
    third = training()
    third.load_state_dict(found)  # and loading it changed nothing in it
    assert all(map(torch.equal, parameters(third.model), expected))


def test_the_same_training_can_go_back() -> None:
    first = after(training(), 2)
    found = first.state_dict()
    expected = finish(first)
    first.load_state_dict(found)
    assert first.steps == 2
    assert all(map(torch.equal, finish(first), expected))


def test_half_a_batch_is_not_in_the_state() -> None:
    expected, first = finish(training()), after(training(), 2)
    for parts in first.batches():
        for batch in parts:
            with first.record() as tape:
                tape.backward(losses(first.model, batch))
            found = first.state_dict()
            break
        break
    second = training()
    second.load_state_dict(found)
    assert second.steps == 2
    assert all(map(torch.equal, finish(second), expected))


def looped(made: private.Training, after_step: Any = None, after_part: Any = None) -> list[Any]:
    """The loop form, with something done after every step or micro-batch."""
    for parts in made.batches():
        for batch in parts:
            with made.record() as tape:
                tape.backward(losses(made.model, batch))
            if after_part is not None:
                after_part(made)
        made.step()
        if after_step is not None:
            after_step(made)
    return parameters(made.model)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("save", "load"), [(1, 2), (1, 4), (3, 4)])
def test_a_checkpoint_may_be_loaded_inside_the_loop(save: int, load: int, num_workers: int) -> None:
    kept: list[Any] = []

    def back(made: private.Training) -> None:
        if made.steps == save and not kept:
            kept.append(made.state_dict())
        if made.steps == load and len(kept) == 1:
            kept.append(made.load_state_dict(kept[0]))

    torch.manual_seed(0)
    expected = looped(training(net(dropout=0.3)))
    torch.manual_seed(0)
    found = looped(training(net(dropout=0.3), num_workers=num_workers), back)
    assert len(kept) == 2
    assert all(map(torch.equal, found, expected))


def test_a_fork_inside_the_loop_reads_the_batches_of_its_own_coins() -> None:
    rows = torch.arange(40.0)[:, None].expand(40, 5), data()[1]
    made, read = training(given=rows), []

    def fork(made: private.Training) -> None:
        if made.steps == 2 and not made.ledger.elsewhere:
            made.load_state_dict(made.state_dict(), fork=True)

    for parts in made.batches():
        drawn = made.sampler.drawn(made.steps).tolist()
        for batch in parts:
            read += batch[0][:, 0].int().tolist()
            with made.record() as tape:
                tape.backward(losses(made.model, batch))
        assert read == drawn
        read.clear()
        made.step()
        fork(made)
    assert made.ledger.spent == 6 + 4


def test_two_loops_at_once_keep_their_places() -> None:
    expected, made = finish(training()), training()
    waiting = made.batches()
    next(waiting)  # of step 1, and never read
    for step in made:
        assert step == 1
        break
    for parts in waiting:
        for batch in parts:
            with made.record() as tape:
                tape.backward(losses(made.model, batch))
        made.step()
    assert all(map(torch.equal, parameters(made.model), expected))


def test_a_state_saved_inside_a_batch_repeats_its_dropout() -> None:
    kept: list[Any] = []

    def save(made: private.Training) -> None:
        if made.steps == 2:
            kept.append(made.state_dict())

    expected = looped(training(net(dropout=0.3), micro_batch=3), after_part=save)
    assert len(kept) > 1
    for found in kept:
        second = training(net(dropout=0.3), micro_batch=3)
        second.load_state_dict(found)
        assert all(map(torch.equal, finish(second), expected))


def test_workers_ahead_are_not_in_the_state() -> None:
    expected, first = finish(training()), after(training(num_workers=2), 3)
    second = training()
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, finish(second), expected))


# ---------------------------------------------------------------------- what does not fit


OTHERS: dict[str, tuple[Any, str]] = {
    "noise multiplier": (lambda: training(plan=planned(noise_multiplier=1.1)), "noise_multiplier"),
    "steps": (lambda: training(plan=planned(steps=7)), "steps"),
    "clipping": (lambda: training(plan=planned(clipping="automatic")), "clipping"),
    "values": (lambda: training(given=(data()[0] + 1, data()[1])), "other data"),
    "labels": (lambda: training(given=(data()[0], 2 - data()[1])), "other data"),
    "order": (lambda: training(given=tuple(t.flip(0) for t in data())), "other data"),
    "kind of data": (lambda: training(given=list(zip(*data(), strict=True))), "other data"),
    "learning rate": (lambda: training(lr=0.2), "another optimizer"),
    "optimizer": (lambda: made("adam", "none"), "another optimizer"),
    "a scheduler more": (lambda: made("sgd", "cosine"), "another optimizer or scheduler"),
    "model": (
        lambda: training(nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))),
        "another model",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_thing_is_refused_and_nothing_changes(name: str) -> None:
    other, words = OTHERS[name][0](), OTHERS[name][1]
    found = after(training(), 3).state_dict()
    before, secret = parameters(other.model), other.noise.secret
    with pytest.raises(persample.UsageError, match=words) as caught:
        other.load_state_dict(found)
    assert caught.value.fix
    assert len(str(caught.value).splitlines()) <= 4
    assert all(map(torch.equal, parameters(other.model), before))
    assert (other.steps, other.noise.secret) == (0, secret)


@pytest.mark.parametrize("other", ["steps", "another lambda", "one after the other", "none"])
def test_another_scheduler_is_refused(other: str) -> None:
    found = after(made("adam", "lambda"), 3).state_dict()
    with pytest.raises(persample.UsageError, match="optimizer or scheduler"):
        made("adam", other).load_state_dict(found)


@pytest.mark.parametrize("found", [{}, None, {"model": 1}, [1]])
def test_what_is_no_state_is_refused(found: Any) -> None:
    with pytest.raises(persample.UsageError, match="not the state"):
        training().load_state_dict(found)


def test_other_users_are_refused() -> None:
    def owned(users: Any) -> private.Training:
        return training(plan=planned(unit="user", size=20, batch_size=5), users=users)

    found = owned(torch.arange(40) % 20).state_dict()
    with pytest.raises(persample.UsageError, match="other data"):
        owned(torch.arange(40) // 2).load_state_dict(found)


# ---------------------------------------------------------------------- forks


def test_a_fork_has_new_secrets_and_counts_both_branches() -> None:
    first = after(training(), 2)
    found = first.state_dict()
    fork = training()
    fork.load_state_dict(found, fork=True)
    assert fork.noise.secret != first.noise.secret
    assert fork.sampler.secret != first.sampler.secret
    assert fork.ledger.spent == 6  # two of its own, and the four that the other may take
    assert not any(map(torch.equal, finish(fork), finish(first)))
    assert fork.ledger.spent == 10
    assert first.ledger.spent == 6
    again = training()
    again.load_state_dict(fork.state_dict(), fork=True)
    assert again.ledger.spent == 10


def test_a_fork_costs_more() -> None:
    pytest.importorskip("dp_accounting")
    first = after(training(), 2)
    fork = training()
    fork.load_state_dict(first.state_dict(), fork=True)
    finish(fork)
    assert fork.epsilon() == planned().epsilon(10) > planned().epsilon()


def test_a_fork_may_have_another_optimizer() -> None:
    found = after(training(), 2).state_dict()
    fork = training(lr=0.5)
    fork.load_state_dict(found, fork=True)
    assert fork.optimizer.param_groups[0]["lr"] == 0.5
    finish(fork)


def test_a_fork_of_correlated_noise_is_refused() -> None:
    found = after(training(plan=planned(bands=3)), 2).state_dict()
    with pytest.raises(persample.UsageError, match="correlated"):
        training(plan=planned(bands=3)).load_state_dict(found, fork=True)


# ---------------------------------------------------------------------- the file


def test_the_state_says_that_it_is_secret_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    first = training()
    first.save(tmp_path / "state.pt")
    assert stat.S_IMODE(os.stat(tmp_path / "state.pt").st_mode) == 0o600
    assert "secret" in torch.load(tmp_path / "state.pt", weights_only=True)["notice"]
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt(), RuntimeError("write")])
def test_a_save_that_fails_leaves_the_last_one(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, path = after(training(), 2), tmp_path / "state.pt"
    first.save(path)
    before = path.read_bytes()
    finish(first)

    def fail(found: Any, file: Any) -> None:
        file.write(b"half")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(state.torch, "save", fail)
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else persample.StorageError
        with pytest.raises(kind):
            first.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]
    training().load_state_dict(torch.load(path, weights_only=True))


KILLED = """
import sys, torch
from tests.private.programs import training
made = training()
made.save(sys.argv[1])
print("saved", flush=True)
while True:
    made.save(sys.argv[1])
"""


def test_a_process_that_is_killed_while_saving_leaves_a_whole_file(tmp_path: Path) -> None:
    path, root = tmp_path / "state.pt", Path(__file__).parents[2]
    places = os.pathsep.join([str(root), str(Path(persample.__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, cwd=root,
        env={**os.environ, "PYTHONPATH": places},
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"saved\n"
        time.sleep(0.2)
        process.kill()
    training().load_state_dict(torch.load(path, weights_only=True))


def test_a_place_that_does_not_exist() -> None:
    with pytest.raises(persample.StorageError) as caught:
        training().save("nowhere/state.pt")
    assert len(str(caught.value).splitlines()) <= 4


def test_half_a_file_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    training().save(path)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises((RuntimeError, EOFError, OSError)):
        torch.load(path, weights_only=True)


def test_versions_are_in_the_state() -> None:
    found = training(noise_generator=seeded(1)).state_dict()["versions"]
    assert found["persample"] == persample.__version__
    assert "torch" in found
