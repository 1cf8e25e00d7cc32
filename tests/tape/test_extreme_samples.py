"""A sample with inputs of 1e16 in a float32 attention layer.

Its logits are about 1e32, so a softmax turns the rounding of one matrix product into another
gradient, and torch rounds matrix products differently for different batch sizes. The gradient of
such a sample is what torch computes; what the tape says of it must follow from that gradient
alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import persample

from ..models import MODELS, flat_loss

pytestmark = pytest.mark.filterwarnings("ignore::persample.NonFiniteWarning")
SCALES = (1e15, 1e16, 2e16, 2e17, 1e18)


def build(seed: int, size: float, n: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    model, _ = MODELS["transformer_layer"](3)
    x = torch.randn(n, 2, 8)
    x[0] *= size
    return model, x


def record(model: nn.Module, x: Tensor, *, lean: bool = False) -> persample.Tape:
    with persample.record(model, lean=lean) as tape:
        tape.backward(flat_loss(model(x)))
    return tape


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("size", SCALES)
def test_others_change_nothing_of_it(size: float, n: int, lean: bool) -> None:
    """At equal shapes its verdict, its norm and its gradient are the same bits."""
    model, x = build(2, size, n)
    found = []
    for others in (1.0, 0.0, 1e16, float("inf"), float("nan")):
        batch = x.clone()
        batch[1:] *= others
        tape = record(model, batch, lean=lean)
        bad, norm = 0 in tape.nonfinite().tolist(), tape.norms()[0]
        row = {name: g[0].nan_to_num(3.0) for name, g in tape.grads().items()}
        found.append((bad, norm, row))
    for bad, norm, row in found[1:]:
        assert bad == found[0][0]
        assert norm.equal(found[0][1]) or bool(norm.isnan() and found[0][1].isnan())
        assert all(torch.equal(row[name], found[0][2][name]) for name in row)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", SCALES)
def test_the_verdict_is_that_of_its_gradient(size: float, seed: int) -> None:
    """Whatever n: it is left out exactly if the square of its gradient's norm overflows."""
    most = torch.finfo(torch.float32).max
    for n in (1, 2, 3, 4, 8):
        model, x = build(seed, size, n)
        tape = record(model, x)
        row = torch.cat([g[0].double().flatten() for g in tape.grads().values()])
        square = row.square().sum().item()
        if not 1e-3 * most < square < 1.01 * most:  # bounds of norms overflow a little earlier
            bad = not square < most  # also if it is not a number
            assert (0 in tape.nonfinite().tolist()) == bad
            total = sum(v.double().square().sum() for v in tape.clipped_sum(1e-3).values())
            assert bad or float(total) > 0


def test_a_zero_gradient_with_a_huge_input_is_zero() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    x[2] = 1e38  # tanh is flat there
    with persample.record(net) as tape:
        tape.backward(net(x).square().sum(1))
    expected = torch.stack([g.flatten(1).norm(dim=1) for g in tape.grads().values()]).norm(dim=0)
    torch.testing.assert_close(tape.norms(), expected)
    assert bool((tape.grads()["0.weight"][2] == 0).all())
