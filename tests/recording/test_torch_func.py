"""torch.func and forward-mode derivatives in a recording: refused, or followed by the loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp

import persample
from persample.testing import relative_error

N = 4  # samples, and features
Losses = Callable[[nn.Module, Tensor], Tensor]


def tangent(x: Tensor) -> Tensor:
    return x.detach().cos()


def dual(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(x, tangent(x)))
        primal, change = forward_ad.unpack_dual(out)
        return (primal + change).square().sum(1)


UNFOLLOWED: dict[str, Losses] = {
    "vmap of the model": lambda m, x: torch.vmap(m)(x).square().sum(1),
    "vmap of the losses": lambda m, x: torch.vmap(lambda a: m(a).square().sum())(x),
    "vmap of an axis": lambda m, x: (
        torch.vmap(m, in_dims=1, out_dims=1)(x[:, None].expand(-1, 3, -1)).square().sum((1, 2))
    ),
    "functional_call in vmap": lambda m, x: torch.vmap(
        lambda a: functional_call(m, dict(m.named_parameters()), (a,)).sum()
    )(x),
    "jvp": lambda m, x: torch.add(*jvp(m, (x,), (tangent(x),))).square().sum(1),
    "jvp of the losses": lambda m, x: jvp(lambda y: m(y).sum(1), (x,), (tangent(x),))[1],
    "jacrev": lambda m, x: torch.vmap(lambda a: jacrev(m)(a).diagonal().sum())(x),
    "jacfwd": lambda m, x: torch.vmap(jacfwd(m))(x).square().sum((1, 2)),
    "grad": lambda m, x: torch.vmap(grad(lambda a: m(a).sum()))(x).square().sum(1),
    "vjp": lambda m, x: vjp(m, x)[1](tangent(x))[0].square().sum(1),
    "dual numbers": dual,
    "dual numbers of inputs with gradients": lambda m, x: dual(m, x.clone().requires_grad_()),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(N, 5), nn.Tanh(), nn.Linear(5, N)).double()


def native(model: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    """The gradient of each loss by its own backward pass."""
    named = dict(model.named_parameters())
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for loss in losses:
        found = torch.autograd.grad(
            loss, list(named.values()), retain_graph=True, allow_unused=True
        )
        for (name, p), g in zip(named.items(), found, strict=True):
            rows[name].append(torch.zeros_like(p) if g is None else g)
    return {name: torch.stack(row) for name, row in rows.items()}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # forward mode loads scripts
@pytest.mark.parametrize("name", UNFOLLOWED)
def test_refused_or_looped(name: str) -> None:
    model, x, losses = network(), torch.randn(N, N, dtype=torch.float64), UNFOLLOWED[name]
    expected = native(model, losses(model, x))
    with (
        persample.record(model) as tape,
        pytest.raises(persample.MixedSamplesError, match="samples interact") as caught,
    ):
        tape.backward(losses(model, x))
    assert "loop" in caught.value.fix
    with persample.record(model, unproven="loop") as tape:
        tape.backward(losses(model, x))
    assert relative_error(tape.grads(), expected) < 1e-12


def test_the_message_names_the_transform() -> None:
    model = network()
    with (
        persample.record(model) as tape,
        pytest.raises(persample.MixedSamplesError, match=r"torch\.func transform"),
    ):
        tape.backward(torch.vmap(model)(torch.randn(N, N, dtype=torch.float64)).sum(1))


@pytest.mark.parametrize("gradients", [False, True])
def test_what_has_no_gradient_is_a_constant(gradients: bool) -> None:
    model, x = network(), torch.randn(N, N, dtype=torch.float64)
    with persample.record(model) as tape:
        losses = model(x).square().sum(1)
        with torch.set_grad_enabled(gradients):
            torch.vmap(model)(x)  # to look at
        tape.backward(losses)
    assert relative_error(tape.grads(), native(model, model(x).square().sum(1))) < 1e-12
