"""Bad input gets a clear error and leaves the tape usable."""

from __future__ import annotations

import copy
import linecache
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample

NAN, INF = float("nan"), float("inf")


def tape_of(
    model: nn.Module, width: int = 4, dtype: torch.dtype = torch.float32, **options: Any
) -> persample.Tape:
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(0)).to(dtype)
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
    "complex coefficients": (lambda t: t.weighted_sum(torch.ones(3) * 1j), "real"),
    "coefficients elsewhere": (lambda t: t.weighted_sum(torch.ones(3, device="meta")), "meta"),
    "sparse coefficients": (lambda t: t.weighted_sum(torch.ones(3).to_sparse()), "coefficients"),
    "bound of text": (lambda t: t.clipped_sum("1"), "max_norm"),  # type: ignore[arg-type]
    "bound of nothing": (lambda t: t.clipped_sum(None), "max_norm"),  # type: ignore[arg-type]
    "truth value as bound": (lambda t: t.clipped_sum(True), "max_norm"),
    "bound for each sample": (lambda t: t.clipped_sum(torch.ones(3)), "one number"),  # type: ignore[arg-type]
    "negative bound": (lambda t: t.clipped_sum(-1.0), "max_norm"),
    "NaN bound": (lambda t: t.clipped_sum(NAN), "max_norm"),
    "infinite bound": (lambda t: t.clipped_sum(INF), "max_norm"),
    "rule without arguments": (lambda t: t.clipped_sum(1.0, rule=lambda: 1.0), "takes norms"),  # type: ignore[arg-type, return-value, misc]
    "rule with sparse coefficients": (
        lambda t: t.clipped_sum(1.0, rule=lambda norms: norms.to_sparse()), "sparse_coo"),
    "rule with few coefficients": (
        lambda t: t.clipped_sum(1.0, rule=lambda norms: norms[:1]), "coefficients"),
    "rule with negative coefficients": (
        lambda t: t.clipped_sum(1.0, rule=lambda norms: -norms), "negative"),
    "rule with NaN": (
        lambda t: t.clipped_sum(1.0, rule=lambda norms: norms * NAN), "non-finite"),
    "rule with complex coefficients": (
        lambda t: t.clipped_sum(1.0, rule=lambda norms: norms * 1j), "real"),
    "rule with a number": (lambda t: t.clipped_sum(1.0, rule=lambda norms: 1.0), "coefficients"),  # type: ignore[arg-type, return-value]
    "rule elsewhere": (lambda t: t.clipped_sum(1.0, rule=lambda norms: norms.to("meta")), "meta"),
    "rule that is not called": (
        lambda t: t.clipped_sum(1.0, rule=persample.per_layer), r"per_layer\(\)"),  # type: ignore[arg-type]
    "rule of text": (lambda t: t.clipped_sum(1.0, rule="flat"), "'flat'"),  # type: ignore[arg-type]
    "no rule": (lambda t: t.clipped_sum(1.0, rule=None), "None"),  # type: ignore[arg-type]
    "groups of strings": (
        lambda t: t.clipped_sum(1.0, rule=persample.per_group(["weight", "bias"])), "are lists"),
    "groups that name one twice": (
        lambda t: t.clipped_sum(1.0, rule=persample.per_group([["weight", "bias"], ["bias"]])),
        r"\['bias'\]"),
    "groups that leave some out": (
        lambda t: t.clipped_sum(1.0, rule=persample.per_group([["weight"]])), "every recorded"),
    "direction without a name": (lambda t: t.dots(direction(bias=None)), "'bias'"),
    "direction with a name too many": (
        lambda t: t.dots(direction(extra=torch.zeros(1))), "'extra'"),
    "direction of another shape": (
        lambda t: t.dots(direction(weight=torch.zeros(4, 2))), r"direction \(4, 2\)"),
    "direction of numbers": (lambda t: t.dots(direction(bias=1.0)), "tensor"),
    "direction that is a tensor": (lambda t: t.dots(torch.zeros(10)), "dictionary"),  # type: ignore[arg-type]
    "direction without one selected": (
        lambda t: t.dots({"bias": direction()["bias"]}, params="weight"), "'weight'",
    ),
    "complex direction": (lambda t: t.dots(direction(bias=torch.zeros(2) * 1j)), "complex"),
    "direction elsewhere": (
        lambda t: t.dots(direction(bias=torch.zeros(2, device="meta"))), "device"),
    "sparse direction": (lambda t: t.dots(direction(bias=torch.zeros(2).to_sparse())), "dense"),
    "tape of another width": (lambda t: t.cross(other(3, 2, width=3)), "different models"),
    "tape of other names": (
        lambda t: t.cross(tape_of(nn.Sequential(nn.Linear(4, 2)))), "in common"),
    "tape of another dtype": (
        lambda t: t.cross(tape_of(nn.Linear(4, 2).double(), dtype=torch.float64)), "dtype"),
    "closed tape": (lambda t: t.cross(closed()), "closed"),
    "no tape": (lambda t: t.cross(t.norms()), "another tape"),  # type: ignore[arg-type]
    "dimension 0": (lambda t: t.project(0, seed=0), "dim"),
    "dimension of a float": (lambda t: t.project(2.0, seed=0), "dim"),  # type: ignore[arg-type]
    "seed of a float": (lambda t: t.project(2, seed=0.5), "seed"),  # type: ignore[arg-type]
    "unknown parameter": (lambda t: t.norms(params="wieght"), "'wieght'"),
    "a module as params": (lambda t: t.norms(params=nn.Linear(4, 2)), "params="),  # type: ignore[arg-type]
    "a number as params": (lambda t: t.norms(params=3), "params="),  # type: ignore[arg-type]
    "parameters as params": (lambda t: t.norms(params=[torch.zeros(2)]), "a tensor"),  # type: ignore[list-item]
    "no params": (lambda t: t.norms(params=lambda name: "wieght" in name), "selects no"),
    "buffers of a list": (lambda t: t.grads(out=[1]), "dictionary"),  # type: ignore[arg-type]
    "buffers of numbers": (lambda t: t.grads(out=dict.fromkeys(t.names, 1.0)), "got 1.0"),  # type: ignore[arg-type]
    "buffers of another dtype": (
        lambda t: t.grads(out={k: g.double() for k, g in t.grads().items()}), "float64"),
    "buffers elsewhere": (
        lambda t: t.grads(out={k: g.to("meta") for k, g in t.grads().items()}), "meta"),
    "sparse buffers": (
        lambda t: t.grads(out={k: g.to_sparse() for k, g in t.grads().items()}), "dense"),
    "buffers with a gradient": (
        lambda t: t.grads(out={k: g.requires_grad_() for k, g in t.grads().items()}), "gradient"),
    "expanded buffers": (
        lambda t: t.grads(out={k: g[:1].expand(3, *g.shape[1:]) for k, g in t.grads().items()}),
        "dense"),
    "buffers in one place": (
        lambda t: t.grads(out=(lambda w: {"weight": w, "bias": w[:, :, 0]})(torch.zeros(3, 2, 4))),
        "share memory"),
    "buffers without a name": (lambda t: t.grads(out={}), "out"),
    "buffers of another shape": (
        lambda t: t.grads(out={"weight": torch.zeros(1), "bias": torch.zeros(1)}), "out"),
    "gradient of an unknown name": (lambda t: t.set_grad({"x": torch.zeros(1)}), "'x'"),
    "gradient of another shape": (lambda t: t.set_grad(t.grads()), "sums over samples"),
    "gradients of a list": (lambda t: t.set_grad([1]), "takes"),  # type: ignore[arg-type]
    "gradients of numbers": (lambda t: t.set_grad({"bias": 1.0}), "got 1.0"),  # type: ignore[dict-item]
    "gradients elsewhere": (
        lambda t: t.set_grad({"bias": torch.zeros(2, device="meta")}), "meta"),
    "complex gradients": (lambda t: t.set_grad({"bias": torch.zeros(2) * 1j}), "complex"),
    "asked inside vmap": (
        lambda t: torch.func.vmap(lambda c: t.norms() * c)(torch.ones(2)), "transform"),
    "asked inside grad": (
        lambda t: torch.func.grad(lambda c: t.weighted_sum(c)["bias"].sum())(torch.ones(3)),
        "transform"),
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
    with pytest.raises(persample.UsageError, match=phrase) as caught:
        ask(tape)
    assert caught.value.fix
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
        "set_clipped_grad",
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
    if lean and name in ("norms", "parameter_norms", "nonfinite"):
        ask(tape)  # taken in the first pass
    elif lean and name in ("cross", "positions"):
        with pytest.raises(persample.UsageError, match="keeps no gradients"):
            ask(tape)
    else:
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
        with pytest.raises(persample.UsageError, match="dense"):
            tape.backward(losses.to_sparse())
        for scale in (torch.ones(3), "2", [1.0], 1j, torch.ones((), device="meta")):
            with pytest.raises(persample.UsageError, match="one number"):
                tape.backward(losses, scale=scale)  # type: ignore[arg-type]
        for wrong in ([*losses], losses.detach().numpy(), {"loss": losses}, None):
            with pytest.raises(persample.UsageError, match="takes a tensor of losses"):
                tape.backward(wrong)  # type: ignore[arg-type]
        tape.backward(losses, scale=torch.tensor(2.0))
    assert tape.norms().shape == (3,)


def test_inputs_without_samples_are_named() -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    with (
        persample.record(model, n=3) as tape,
        pytest.raises(persample.UsageError, match=r"3 indices on axis 0: input \(4,\)"),
    ):
        tape.backward(torch.stack([model(row).sum() for row in x]))


@pytest.mark.parametrize("constants", [0, "input", [0], ("input",)])
def test_inputs_that_are_all_constants(constants: Any) -> None:
    model = nn.Linear(4, 2)
    with (
        persample.record(model, constants=constants) as tape,
        pytest.raises(persample.UsageError, match=r"names all of them: input \(3, 4\)"),
    ):
        tape.backward(model(torch.randn(3, 4)).sum(1))


@pytest.mark.parametrize(
    "ids",
    [
        [0, 0, 1],
        torch.tensor([0.0, 0.5, 1.0]),
        torch.zeros(3, 1).long(),
        torch.tensor([0, 0, 1]).to_sparse(),
    ],
)
def test_marks_that_cannot_be(ids: Any) -> None:
    with persample.record(nn.Linear(4, 2), n=2) as tape:
        with pytest.raises(persample.UsageError, match="integers with one axis"):
            tape.mark(torch.randn(3, 4), ids=ids)
        with pytest.raises(persample.UsageError, match="dim"):
            tape.mark(torch.randn(2, 4), dim="0")  # type: ignore[arg-type]


def test_forgotten_with() -> None:
    with pytest.raises(AttributeError, match=r"with persample\.record"):
        persample.record(nn.Linear(4, 2)).backward(torch.ones(3))  # type: ignore[attr-defined]


def test_numbers_of_other_libraries() -> None:
    numpy = pytest.importorskip("numpy")
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    with persample.record(model, n=numpy.int64(3), dim=torch.tensor(0)) as tape:  # type: ignore[arg-type]
        tape.backward(model(x).square().sum(1), scale=numpy.float32(2))
    found = tape.project(numpy.int64(4), seed=numpy.int64(0))
    assert torch.equal(found, tape.project(4, seed=0))
    assert torch.equal(tape.clipped_sum(numpy.float32(1))["bias"], tape.clipped_sum(1)["bias"])


def test_errors_are_short() -> None:
    model = nn.Linear(4, 2)
    with persample.record(model) as tape:
        source = "losses = model(torch.randn(3, 4)).square().sum(1).max()" + " + 0" * 200
        with pytest.raises(persample.PersampleError) as caught:
            exec_as_file(source + "; tape.backward(losses)", {"model": model, "tape": tape})
    assert "model(torch.randn" in caught.value.where
    assert len(caught.value.where) < 300


def exec_as_file(source: str, names: dict[str, Any]) -> None:
    """Run a line that errors can quote."""
    name = "/nowhere/long.py"
    linecache.cache[name] = (len(source), None, [source + "\n"], name)
    exec(compile(source, name, "exec"), {"torch": torch, **names})


def test_a_call_without_gradients_does_not_decide_how_many_samples_there_are() -> None:
    model, few, many = nn.Linear(4, 2), torch.randn(3, 4), torch.randn(5, 4)
    with (
        pytest.raises(persample.UsageError, match=r"not clear: 5 or 3(?s:.*)n=3"),
        persample.record(model),
    ):
        with torch.no_grad():
            model(many)
        model(few)
    with persample.record(model, n=3) as tape:
        with torch.no_grad():
            model(many)
        tape.backward(model(few).square().sum(1))
    with persample.record(model) as other:
        with torch.no_grad():
            model(few)
        other.backward(model(few).square().sum(1))
    torch.testing.assert_close(tape.norms(), other.norms())
