"""Bad input gets a clear error and leaves the tape usable."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample

NAN, INF = float("nan"), float("inf")


def tape_of(model: nn.Module, width: int = 4, **options: Any) -> persample.Tape:
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(0))
    with persample.record(model, **options) as tape:
        tape.backward(model(x).square().sum((1, 2)), retain_graph=True)
    return tape


def direction(**changes: Any) -> dict[str, Tensor]:
    found = {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)} | changes
    return {name: value for name, value in found.items() if value is not None}


def other(*sizes: int, width: int = 4) -> persample.Tape:
    return tape_of(nn.Linear(*sizes), width)


def closed() -> persample.Tape:
    tape = other(4, 2)
    tape.close()
    return tape


BAD: dict[str, tuple[Callable[[persample.Tape], Any], str]] = {
    "too few coefficients": (lambda t: t.weighted_sum(torch.ones(2)), r"shape \(3,\)"),
    "coefficients of a matrix": (lambda t: t.weighted_sum(torch.ones(3, 1)), r"shape \(3,\)"),
    "NaN coefficient": (lambda t: t.weighted_sum(torch.tensor([1, NAN, 0])), "finite"),
    "infinite coefficient": (lambda t: t.weighted_sum(torch.tensor([1, INF, 0])), "finite"),
    "coefficients of a list": (lambda t: t.weighted_sum([1, 1, 1]), "coefficients"),  # type: ignore[arg-type]
    "negative bound": (lambda t: t.clipped_sum(-1.0), "max_norm"),
    "NaN bound": (lambda t: t.clipped_sum(NAN), "max_norm"),
    "infinite bound": (lambda t: t.clipped_sum(INF), "max_norm"),
    "rule with few coefficients": (
        lambda t: t.clipped_sum(1.0, rule=lambda norms: norms[:1]), "coefficients"),
    "rule with negative coefficients": (
        lambda t: t.clipped_sum(1.0, rule=lambda norms: -norms), "negative"),
    "rule with NaN": (
        lambda t: t.clipped_sum(1.0, rule=lambda norms: norms * NAN), "non-finite"),
    "groups that leave some out": (
        lambda t: t.clipped_sum(1.0, rule=persample.per_group([["weight"]])), "every recorded"),
    "direction without a name": (lambda t: t.dots(direction(bias=None)), "'bias'"),
    "direction with a name too many": (
        lambda t: t.dots(direction(extra=torch.zeros(1))), "'extra'"),
    "direction of another shape": (
        lambda t: t.dots(direction(weight=torch.zeros(4, 2))), r"direction \(4, 2\)"),
    "direction of numbers": (lambda t: t.dots(direction(bias=1.0)), "tensor"),
    "direction that is a tensor": (lambda t: t.dots(torch.zeros(10)), "dictionary"),  # type: ignore[arg-type]
    "direction not selected": (lambda t: t.dots(direction(), params="weight"), "'bias'"),
    "tape of another width": (lambda t: t.cross(other(3, 2, width=3)), "different models"),
    "tape of other names": (
        lambda t: t.cross(tape_of(nn.Sequential(nn.Linear(4, 2)))), "different models"),
    "closed tape": (lambda t: t.cross(closed()), "closed"),
    "no tape": (lambda t: t.cross(t.norms()), "another tape"),  # type: ignore[arg-type]
    "dimension 0": (lambda t: t.project(0, seed=0), "dim"),
    "dimension of a float": (lambda t: t.project(2.0, seed=0), "dim"),  # type: ignore[arg-type]
    "seed of a float": (lambda t: t.project(2, seed=0.5), "seed"),  # type: ignore[arg-type]
    "unknown parameter": (lambda t: t.norms(params="wieght"), "'wieght'"),
    "buffers without a name": (lambda t: t.grads(out={}), "out"),
    "buffers of another shape": (
        lambda t: t.grads(out={"weight": torch.zeros(1), "bias": torch.zeros(1)}), "out"),
    "gradient of an unknown name": (lambda t: t.set_grad({"x": torch.zeros(1)}), "'x'"),
    "gradient of another shape": (lambda t: t.set_grad(t.grads()), "sums over samples"),
    "pickled": (pickle.dumps, "neither copied nor pickled"),
    "copied": (copy.deepcopy, "neither copied nor pickled"),
}  # fmt: skip


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_refused_and_still_usable(name: str, lean: bool) -> None:
    ask, phrase = BAD[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    tape = tape_of(model, lean=lean)
    before = tape.norms()
    with pytest.raises(persample.UsageError, match=phrase):
        ask(tape)
    assert torch.equal(tape.norms(), before)
    assert all(p.grad is None for p in model.parameters())
    tape.clipped_sum(1.0)
    tape.dots(direction())


QUESTIONS: dict[str, Callable[[persample.Tape], Any]] = {
    "grads": lambda t: t.grads(), "norms": lambda t: t.norms(), "gram": lambda t: t.gram(),
    "parameter_norms": lambda t: t.parameter_norms(), "nonfinite": lambda t: t.nonfinite(),
    "weighted_sum": lambda t: t.weighted_sum(torch.ones(3)),
    "clipped_sum": lambda t: t.clipped_sum(1.0), "cosine": lambda t: t.cosine(),
    "cross": lambda t: t.cross(t), "dots": lambda t: t.dots(direction()),
    "project": lambda t: t.project(3, seed=0), "positions": lambda t: t.positions(),
    "second_moment": lambda t: t.second_moment(), "variance": lambda t: t.variance(),
    "noise_scale": lambda t: t.noise_scale(),
}  # fmt: skip


def test_the_table_of_questions_is_complete() -> None:
    others = {
        "n",
        "names",
        "mark",
        "backward",
        "receive",
        "retains",
        "explain",
        "close",
        "set_grad",
    }
    public = {name for name in dir(persample.Tape) if not name.startswith("_")}
    assert public - others == set(QUESTIONS)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", QUESTIONS)
def test_asked_too_early_too_late_or_of_nothing(name: str, lean: bool) -> None:
    ask, model, x = QUESTIONS[name], nn.Linear(4, 2), torch.randn(3, 5, 4)
    options = {"lean": True} if lean else {"positions": True}
    with persample.record(model, **options) as tape:
        losses = model(x).square().sum((1, 2))
        with pytest.raises(persample.UsageError, match="backward"):
            ask(tape)
        tape.backward(losses)
    if not lean or name not in ("cross", "positions"):
        ask(tape)
    with torch.no_grad():
        model.weight.mul_(2)  # an optimiser's step
    with pytest.raises(persample.StaleError, match="'weight' was modified"):
        ask(tape)
    tape.close()
    with pytest.raises(persample.UsageError, match="closed"):
        ask(tape)


def test_losses_that_cannot_be_and_scales() -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    with persample.record(model) as tape:
        losses = model(x).square().sum(1)
        with pytest.raises(persample.UsageError, match="real"):
            tape.backward(losses * (1 + 1j))
        with pytest.raises(persample.UsageError, match="one number"):
            tape.backward(losses, scale=torch.ones(3))
        tape.backward(losses, scale=torch.tensor(2.0))
    assert tape.norms().shape == (3,)


def test_inputs_without_samples_are_named() -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    with (
        persample.record(model, n=3) as tape,
        pytest.raises(persample.UsageError, match=r"3 indices on axis 0: input \(4,\)"),
    ):
        tape.backward(torch.stack([model(row).sum() for row in x]))
