"""``persample private``: the demonstration, and the user's own function."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import persample
from persample.command_line.target import read
from persample.private import command

from .programs import data, losses, net

pytest.importorskip("dp_accounting")


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(list(words))


def test_the_demonstration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    path = tmp_path / "model.pt"
    short = arguments("--epochs", "1", "--epsilon", "8", "--save", str(path))
    assert command.run(short) == 0
    told = capsys.readouterr()
    assert "accuracy" in told.out
    assert "epsilon" in told.out
    assert "1e-05" in told.out
    assert "6 steps of about 256 samples" in told.err
    assert set(torch.load(path, weights_only=True)) == set(command.DigitNet().state_dict())


def named(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, (batch["x"], batch["y"]))


X, Y = data()
OWN: dict[str, tuple[Any, Any]] = {
    "one batch": ((X, Y), losses),
    "a dictionary": ({"x": X, "y": Y}, named),
    "batches": ([(X[:15], Y[:15]), (X[15:], Y[15:])], losses),
    "dictionaries": ([{"x": X[:15], "y": Y[:15]}, {"x": X[15:], "y": Y[15:]}], named),
    "a loader": (DataLoader(TensorDataset(X, Y), 8, shuffle=True), losses),
}


@pytest.mark.parametrize("name", OWN)
def test_a_function_of_the_user(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, loss = OWN[name]
    target = read("train:step", (net(), loss, given))
    assert command.run(arguments("--epochs", "1", "--batch-size", "10"), target) == 0
    told = capsys.readouterr()
    assert "Sequential on 40 samples: 4 steps" in told.err
    assert "accuracy" not in told.out.splitlines()[0]
    assert "epsilon" in told.out
    assert "one sample" in told.out


@pytest.mark.parametrize(
    "batches", [iter([(X, Y)]), [(X, Y), (X[:, :2], Y)], [{"x": X}, {"y": Y}]], ids=range(3)
)
def test_what_cannot_be_drawn_from_is_refused(batches: Any) -> None:
    with pytest.raises(persample.UsageError) as caught:
        command.samples(batches)
    assert caught.value.fix


def test_delta_is_well_below_one_over_size() -> None:
    for size, delta in ((100, 1e-3), (1437, 1e-5), (10_000, 1e-5), (60_000, 1e-6)):
        assert command.small_delta(size) == pytest.approx(delta)


def test_modes_stay_and_the_model_is_saved_though_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def closed(*words: Any, **options: Any) -> None:
        if options.get("file") is None:
            raise BrokenPipeError

    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 3))
    target, path = read("train:step", (model, losses, (X, Y))), tmp_path / "model.pt"
    monkeypatch.setattr("builtins.print", closed)
    given = arguments("--epochs", "1", "--batch-size", "10", "--save", str(path))
    with pytest.raises(BrokenPipeError):
        command.run(given, target)
    assert not model[1].training
    assert set(torch.load(path, weights_only=True)) == set(model.state_dict())
