"""``unproven="loop"`` and ``verify=True``: several backward passes, gradients of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample
from persample.testing import relative_error


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(1)


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().squeeze(1)


def coupled(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * model(x).mean()).squeeze(1)


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x).squeeze(1)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out + (slope.norm(dim=1) - 1).square()


def curved(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return (bend[:, 0] + out[:, 0] - slope[:, 1]).square()


LOSSES = {f.__name__: f for f in (plain, squared, coupled, penalised, curved)}
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def native(model: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        for loss in losses
    ]
    zeros = [torch.zeros_like(p) for p in named.values()]
    return {
        name: torch.stack([zeros[k] if row[k] is None else row[k] for row in rows])
        for k, name in enumerate(named)
    }


@pytest.mark.parametrize("weights", [[2.0, 2.0, 2.0], [1.0, 2.0, 3.0]])
def test_weighted_losses_are_no_disagreement(weights: list[float]) -> None:
    model, x = net(), torch.randn(3, 4, dtype=torch.float64)
    seed = torch.tensor(weights, dtype=torch.float64)
    with persample.record(model, verify=True) as tape:
        plain(model, x).backward(seed)
    found = tape.weighted_sum(torch.ones(3))
    wanted = torch.autograd.grad(plain(model, x), list(model.parameters()), seed)
    names = [name for name, _ in model.named_parameters()]
    assert relative_error(found, dict(zip(names, wanted, strict=True))) < 1e-12


@pytest.mark.parametrize("second", LOSSES)
@pytest.mark.parametrize("first", LOSSES)
def test_several_backward_passes_add_up(first: str, second: str) -> None:
    model = net()
    with persample.record(model, unproven="loop", same_samples=True) as tape:
        tape.backward(LOSSES[first](model, X))
        tape.backward(LOSSES[second](model, X))
    expected = native(model, LOSSES[first](model, X) + LOSSES[second](model, X))
    assert relative_error(tape.grads(), expected) < 1e-10


def test_verified_passes_add_up() -> None:
    model = net()
    with persample.record(model, verify=True) as tape:
        tape.backward(plain(model, X))
        tape.backward(squared(model, X))
    expected = native(model, plain(model, X) + squared(model, X))
    assert relative_error(tape.grads(), expected) < 1e-10


@pytest.mark.parametrize("name", ["penalised", "curved"])
def test_gradients_of_gradients_can_be_clipped(name: str) -> None:
    model = net()
    with persample.record(model, unproven="loop") as tape:
        tape.backward(LOSSES[name](model, X))
    rows = native(model, LOSSES[name](model, X))
    size = torch.cat([r.flatten(1) for r in rows.values()], 1).norm(dim=1)
    limit = float(size.median())
    scale = (limit / size).clamp(max=1)
    expected = {k: torch.einsum("n,n...->...", scale, r) for k, r in rows.items()}
    assert relative_error(tape.clipped_sum(limit), expected) < 1e-6


def test_a_loop_passes_checkpoints_in_which_samples_interact() -> None:
    """Recomputation is recorded in every pass, and saves what forward saved."""

    def recomputed(model: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(coupled, model, x, use_reentrant=False)
        return found

    model = net()
    with persample.record(model, unproven="loop") as tape:
        tape.backward(recomputed(model, X))
    assert relative_error(tape.grads(), native(model, recomputed(model, X))) < 1e-10


def test_one_loss_is_not_losses() -> None:
    model = net()
    tape = persample.record(model, unproven="loop")
    with pytest.raises(persample.UsageError, match=r"^1 loss for "), tape as opened:
        opened.backward(plain(model, X)[:1])


class Crossed(torch.autograd.Function):
    """Its backward exchanges samples."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.flip(0)


def through_batch(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x).squeeze(1)
    (slope,) = torch.autograd.grad(out, x, out.mean().expand(5), create_graph=True)
    return slope.square().sum(1)


def through_function(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(Crossed.apply(model(x)).sum(), x, create_graph=True)
    return slope.square().sum(1)


def of_others(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x).squeeze(1)
    (slope,) = torch.autograd.grad((out * out.flip(0)).sum(), x, create_graph=True)
    return slope.square().sum(1)


@pytest.mark.parametrize("losses", [through_batch, through_function, of_others, coupled])
def test_gradients_that_mix_samples_cannot_be_clipped(losses: object) -> None:
    assert callable(losses)
    model = net()
    with persample.record(model, unproven="loop") as tape:
        tape.backward(losses(model, X))
    assert relative_error(tape.grads(), native(model, losses(model, X))) < 1e-10
    with pytest.raises(persample.MixedSamplesError):
        tape.clipped_sum(1.0)


def test_a_mean_of_gradients_of_gradients_is_refused() -> None:
    model = net()
    with (
        persample.record(model, unproven="loop") as tape,
        pytest.raises(persample.UsageError, match="one loss per sample"),
    ):
        tape.backward(penalised(model, X).mean())


@pytest.mark.parametrize("unproven", ["refuse", "loop"])
def test_joined_pairs_are_explained(unproven: str) -> None:
    model, y = net(), X.flip(1)

    def losses() -> Tensor:
        a, b = model(torch.cat([X, y])).chunk(2)
        return (a - b).square().squeeze(1)

    with (
        pytest.raises(persample.PersampleError) as caught,
        persample.record(model, unproven=unproven) as tape,
    ):
        tape.backward(losses())
    assert "sample_ids=torch.arange(10) % 5" in caught.value.fix
    with persample.record(model, n=5, sample_ids=torch.arange(10) % 5) as tape:
        tape.backward(losses())
    assert relative_error(tape.grads(), native(model, losses())) < 1e-10


class Scaled(torch.autograd.Function):
    """x ⊙ w; its backward returns the weight's gradient by ``give``."""

    buffer = torch.zeros(4, dtype=torch.float64)

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, give: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.give, ctx.total, ctx.runs = give, torch.zeros_like(w), 0
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        found = (grad * x).sum(0)
        ctx.total += found
        ctx.runs += 1
        if ctx.give == "one buffer":
            found = Scaled.buffer.copy_(found)
        elif ctx.give == "a running sum":
            found = ctx.total
        elif ctx.give == "a count":
            found = found * ctx.runs
        return grad * w, found, None


class Scaling(nn.Module):
    def __init__(self, give: str) -> None:
        super().__init__()
        self.first, self.give = nn.Linear(4, 4), give
        self.w = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Scaled.apply(self.first(x).tanh(), self.w, self.give)
        return out.sum(1)


def test_a_function_that_returns_one_buffer_is_copied() -> None:
    model = Scaling("a tensor").double()
    expected = native(model, model(X))
    model.give = "one buffer"
    with persample.record(model, unproven="loop") as tape:
        tape.backward(model(X))
    assert relative_error(tape.grads(), expected) < 1e-10


@pytest.mark.parametrize("give", ["a running sum", "a count"])
def test_a_function_that_keeps_a_state_is_refused(give: str) -> None:
    model = Scaling(give).double()
    with (
        pytest.raises(persample.VerificationError, match="is another one the second time"),
        persample.record(model, unproven="loop") as tape,
    ):
        tape.backward(model(X))
