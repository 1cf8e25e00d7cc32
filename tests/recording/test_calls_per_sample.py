"""Layers that are called once for every sample: as exact as on the batch, and as small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.forms import Outer, Patches, SingleSamples
from persample.testing import relative_error

N = 5
Compute = Callable[[Any, Tensor], Tensor]


class Loop(nn.Module):
    """A layer that is called as the function says."""

    def __init__(self, layer: nn.Module, compute: Compute) -> None:
        super().__init__()
        self.layer, self.compute = layer, compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.layer, x)


def numbers(x: Tensor) -> Tensor:
    """Every element counts differently, and not linearly."""
    weights = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)
    return (x.tanh() * weights).sum()


def one_by_one(layer: Any, x: Tensor) -> Tensor:
    return torch.stack([numbers(layer(x[i])) for i in range(len(x))])


def slices(layer: Any, x: Tensor) -> Tensor:
    return torch.stack([numbers(layer(x[i : i + 1])) for i in range(len(x))])


def lengths(layer: Any, x: Tensor) -> Tensor:
    """The last channel of the first row says how many rows count: many for one sample."""
    found = []
    for row in x:
        found.append(numbers(layer(row[: int(row[0, -1])])))
    return torch.stack(found)


def some(layer: Any, x: Tensor) -> Tensor:
    """Few of the samples pass the layer at all."""
    return torch.stack([numbers(layer(row) if row[0, -1] > 5 else row) for row in x])


def twice(layer: Any, x: Tensor) -> Tensor:
    return torch.stack([numbers(layer(layer(row)[:1] + row)) for row in x])


def also_at_once(layer: Any, x: Tensor) -> Tensor:
    return torch.stack([numbers(layer(row)) for row in layer(x)])


def rows(*, width: int = 4) -> Tensor:
    x = torch.randn(N, 6, width, dtype=torch.float64)
    x[:, 0, -1] = torch.tensor([6.0, 1, 1, 2, 1])
    return x


CASES: dict[str, tuple[Callable[[], nn.Module], Compute, Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(4, 4), one_by_one, rows),
    "slices": (lambda: nn.Linear(4, 4), slices, rows),
    "lengths": (lambda: nn.Linear(4, 4), lengths, rows),
    "some": (lambda: nn.Linear(4, 4), some, rows),
    "twice": (lambda: nn.Linear(4, 4), twice, rows),
    "also at once": (lambda: nn.Linear(4, 4), also_at_once, rows),
    "wide": (lambda: nn.Linear(64, 64), one_by_one, lambda: rows(width=64)),
    "norm": (lambda: nn.LayerNorm(4), one_by_one, rows),
    "images": (lambda: nn.Conv2d(2, 3, 3), slices, lambda: torch.randn(N, 2, 5, 5).double()),
    "signal": (lambda: nn.Conv1d(6, 9, 2), one_by_one, rows),
    "generic": (lambda: nn.PReLU(6), slices, rows),
    "words": (
        lambda: nn.Embedding(7, 3), one_by_one, lambda: torch.randint(7, (N, 6), dtype=torch.long)
    ),
    "recurrent": (lambda: nn.GRU(4, 3), lambda g, x: one_by_one(lambda r: g(r)[0], x), rows),
}  # fmt: skip


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def truth(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """One loss after the other; not every sample passes the layer."""
    named, each = dict(model.named_parameters()), losses(model, x)
    found: dict[str, list[Tensor]] = {name: [] for name in named}
    for loss in each:
        grads: Any = [None] * len(named)
        if loss.requires_grad:
            grads = torch.autograd.grad(
                loss, list(named.values()), retain_graph=True, allow_unused=True
            )
        for (name, parameter), grad in zip(named.items(), grads, strict=True):
            found[name].append(torch.zeros_like(parameter) if grad is None else grad)
    return {name: torch.stack(rows) for name, rows in found.items()}


def flat(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in grads.values()], 1)


@pytest.mark.parametrize("lean", [False, True], ids=["kept", "lean"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_every_question(case: Any, lean: bool) -> None:
    torch.manual_seed(0)
    layer, compute, data = case
    model, x = Loop(layer(), compute).double(), data()
    with persample.record(model, lean=lean, n=N) as tape:
        tape.mark(x)
        tape.backward(losses(model, x), retain_graph=True)
    expected = truth(model, x)
    g, c = flat(expected), torch.rand(N, dtype=torch.float64)
    close = torch.testing.assert_close
    close(tape.norms(), g.norm(dim=1))
    close(flat({k: v[None] for k, v in tape.weighted_sum(c).items()})[0], c @ g)
    clipped = (0.5 / g.norm(dim=1)).clamp(max=1) @ g
    close(flat({k: v[None] for k, v in tape.clipped_sum(0.5).items()})[0], clipped)
    direction = {k: torch.randn_like(v[0]) for k, v in expected.items()}
    close(tape.dots(direction), g @ flat({k: v[None] for k, v in direction.items()})[0])
    close(flat({k: v[None] for k, v in tape.second_moment().items()})[0], g.square().mean(0))
    with persample.record(model, n=N, positions=True) as joint:  # keeps samples together
        joint.mark(x)
        joint.backward(losses(model, x))
    close(tape.project(8, seed=1), joint.project(8, seed=1))
    if not lean:
        close(tape.gram(), g @ g.T)
        assert relative_error(tape.grads(), expected) < 1e-10


def test_forms_are_those_of_the_batch() -> None:
    for name, kind in (("wide", Outer), ("images", Patches), ("some", SingleSamples)):
        layer, compute, data = CASES[name]
        torch.manual_seed(0)
        model, x = Loop(layer(), compute).double(), data()
        if name == "images":
            model.layer = nn.Conv2d(2, 40, 3).double()
        with persample.record(model, n=N) as tape:
            tape.mark(x)
            tape.backward(losses(model, x))
        form = tape._forms.forms(["layer.weight"])["layer.weight"]
        assert isinstance(form, kind), name


@pytest.mark.parametrize("n", [8, 64])
def test_memory_grows_with_the_samples(n: int) -> None:
    model, x = Loop(nn.Linear(32, 32), one_by_one), torch.randn(n, 3, 32)
    with persample.record(model) as tape:
        tape.backward(losses(model, x))
    kept = sum(entry.form.nbytes() for entry in tape._forms.contributions)
    assert kept <= n * (2 * 3 * 32 + 32) * 4


def test_a_sample_that_is_not_finite_is_left_out() -> None:
    model, x = Loop(nn.Linear(4, 4), lengths), rows().float()
    x[3, 0, 0] = float("nan")
    with persample.record(model) as tape:
        tape.backward(losses(model, x))
    with pytest.warns(persample.NonFiniteWarning):
        total = tape.clipped_sum(1.0)
    keep = [0, 1, 2, 4]
    with persample.record(model) as other:
        other.backward(losses(model, x[keep]))
    for name, value in other.clipped_sum(1.0).items():
        torch.testing.assert_close(total[name], value)
    assert tape.nonfinite().tolist() == [3]
