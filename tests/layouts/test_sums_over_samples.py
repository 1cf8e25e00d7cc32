"""Products that sum over the samples: weighted sums of losses, however they are spelled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.errors import MixedSamplesError

N = 3
C = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dot": lambda losses: torch.dot(losses, C),
    "inner": lambda losses: torch.inner(losses, C),
    "einsum": lambda losses: torch.einsum("n,n->", losses, C),
    "tensordot": lambda losses: torch.tensordot(losses, C, 1),
    "tensordot of two axes": lambda losses: torch.tensordot(losses.view(N, 1), C.view(N, 1), 2),
}


def linear() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(N, 2).double(), torch.randn(N, N, dtype=torch.float64)


@pytest.mark.parametrize("name", SUMS)
def test_a_weighted_sum_of_losses_has_weighted_rows(name: str) -> None:
    model, x = linear()
    rows = persample.testing.oracle(model, lambda m, x: m(x).square().sum(1), x)
    with persample.record(model) as tape:
        tape.backward(SUMS[name](model(x).square().sum(1)))
    expected = {k: torch.einsum("n,n...->n...", C, r) for k, r in rows.items()}
    assert persample.testing.relative_error(tape.grads(), expected) < 1e-12


def test_sums_over_two_axes_of_samples_are_refused() -> None:
    model, x = nn.Linear(N, N).double(), torch.randn(N, N, dtype=torch.float64)
    with persample.record(model) as tape, pytest.raises(MixedSamplesError, match="multiplied"):
        h = model(x)
        tape.backward(torch.tensordot(h, h.T, 2))
