"""Both bridges to Opacus give DP-SGD's step: the same clipped sum, noise and accounting."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import persample
from persample.expanded_weights import call_for_per_sample_grads
from persample.testing import oracle

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    opacus = pytest.importorskip("opacus")
    from opacus.accountants import RDPAccountant
    from opacus.optimizers import DPOptimizerFastGradientClipping

pytestmark = pytest.mark.filterwarnings("ignore")
C, LR, EXPECTED = 0.3, 0.5, 4
Y = torch.tensor([0, 2, 1, 2])


def plain() -> nn.Module:
    """What the validator of ``make_private`` accepts."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(18, 5), nn.PReLU(5), nn.LayerNorm(5), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def attention() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(18, 3)).double()


def data(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 6, generator=generator, dtype=torch.float64), Y[:n]


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def expected(model: nn.Module, n: int, noise: float, seed: int) -> list[Tensor]:
    """The parameters after one step, from one sample at a time."""
    each = list(oracle(model, losses, data(n), n=n).values())
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each]).norm(dim=0)
    generator = torch.Generator().manual_seed(seed)
    after = []
    for p, g in zip(model.parameters(), each, strict=True):
        total = torch.einsum("n,n...->...", (C / norms).clamp(max=1), g)
        total += torch.normal(0, noise * C, p.shape, generator=generator, dtype=p.dtype)
        after.append(p.detach() - LR * total / EXPECTED)
    return after


def through_grad_sample(model: nn.Module, n: int, noise: float, seed: int) -> Any:
    x, y = data(4)
    engine = opacus.PrivacyEngine()
    _, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=EXPECTED),
        noise_multiplier=noise,
        max_grad_norm=C,
        grad_sample_mode="no_op",
        wrap_model=False,
        noise_generator=torch.Generator().manual_seed(seed),
    )
    x, y = data(n)
    logits = call_for_per_sample_grads(model)(x)
    F.cross_entropy(logits, y, reduction="sum").backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad_sample is None for p in model.parameters())
    return engine.accountant


def through_clipped_sum(model: nn.Module, n: int, noise: float, seed: int) -> Any:
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=LR),
        noise_multiplier=noise,
        max_grad_norm=C,
        expected_batch_size=EXPECTED,
        generator=torch.Generator().manual_seed(seed),
    )
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=0.5))
    with persample.record(model) as tape:
        tape.backward(losses(model, data(n)))
    tape.set_grad(tape.clipped_sum(C))
    optimizer.step()
    optimizer.zero_grad()
    return accountant


@pytest.mark.parametrize("noise", [0.0, 1.3])
@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize(
    ("bridge", "build"),
    [
        (through_grad_sample, plain),
        (through_clipped_sum, plain),
        (through_clipped_sum, attention),
    ],
)
def test_one_private_step(bridge: Any, build: Any, n: int, noise: float) -> None:
    model = build()
    wanted = expected(model, n, noise, seed=5)
    accountant = bridge(model, n, noise, 5)
    for p, after in zip(model.parameters(), wanted, strict=True):
        # Opacus divides by the norm plus 1e-6, persample by a certified bound of it
        assert torch.allclose(p.detach(), after, atol=1e-5)
    assert len(accountant.history) == 1
    assert accountant.history[0][0] == noise
