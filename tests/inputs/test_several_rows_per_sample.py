"""Several rows of one sample, and samples without rows: every model of the tests, and others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error

from ..models import MODELS, Case, Fn, flat_loss, par

USERS = torch.tensor([3, 1, 3])  # of five
ALONE = torch.tensor([3, 3, 3])


def token_and_zeros(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        h = torch.cat([s.token.expand(len(x), -1, -1), x, x.new_zeros(len(x), 2, 5)], 1)
        return F.scaled_dot_product_attention(s.q(h), s.k(h), h)

    return Fn(f, token=par(1, 1, 5), q=nn.Linear(5, 5), k=nn.Linear(5, 5)), (torch.randn(n, 4, 5),)


def state_of_zeros(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 4, dtype=x.dtype)
        for k in range(x.shape[1]):
            h = s.step(torch.cat([x[:, k], h], 1)).tanh()
        return h

    return Fn(f, step=nn.Linear(9, 4)), (torch.randn(n, 3, 5),)


def nearest_by_scatter(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        h = s.first(x)
        hard = torch.zeros_like(h).scatter_(-1, h.argmax(-1, keepdim=True), 1.0)
        return s.last(hard + h - h.detach())

    return Fn(f, first=nn.Linear(5, 6), last=nn.Linear(6, 2)), (torch.randn(n, 3, 5),)


def upper_triangle(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        h = s.first(x)
        i, j = torch.triu_indices(4, 4)
        products = torch.zeros(len(x), 4, 4, dtype=x.dtype)
        products[:, i, j] = (h @ h.mT)[:, i, j]
        return (products @ h).sum(1) / (1 + products.abs().sum((1, 2)))[:, None]

    return Fn(f, first=nn.Linear(5, 6)), (torch.randn(n, 4, 5),)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.mm(w.t())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g.mm(w), g.t().mm(x)


def own_function(n: int) -> Case:
    net = Fn(lambda s, x: s.last(Linear.apply(x, s.w).tanh()), w=par(6, 5), last=nn.Linear(6, 2))
    return net, (torch.randn(n, 5),)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


def reversed_gradient(n: int) -> Case:
    net = Fn(lambda s, x: s.last(Reversed.apply(s.w(x))), w=nn.Linear(5, 4), last=nn.Linear(4, 2))
    return net, (torch.randn(n, 5),)


def filters_of_samples(n: int) -> Case:
    def f(s: Any, x: Tensor, z: Tensor) -> Tensor:
        images, filters = x.reshape(1, -1, *x.shape[2:]), s.filters(z).view(-1, 2, 3, 3)
        found = F.conv2d(images, filters, s.bias(z).flatten(), groups=len(x))
        back = F.conv_transpose2d(found, filters, groups=len(x))
        return back.view(len(x), -1)

    net = Fn(f, filters=nn.Linear(3, 72), bias=nn.Linear(3, 4))
    return net, (torch.randn(n, 2, 4, 4), torch.randn(n, 3))


CASES = (
    token_and_zeros, state_of_zeros, nearest_by_scatter, upper_triangle, own_function,
    reversed_gradient, filters_of_samples,
)  # fmt: skip
MORE = {case.__name__: case for case in CASES}
ALL = {**MODELS, **MORE}


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("users", [USERS, ALONE], ids=["several", "one"])
def test_rows_of_users(users: Tensor, name: str, lean: bool) -> None:
    torch.manual_seed(0)
    model, batch = ALL[name](len(users))
    model = model if any(p.is_complex() for p in model.parameters()) else model.double()
    batch = tuple(x.double() if x.dtype == torch.float32 else x for x in batch)
    rows = oracle(model, lambda m, b: flat_loss(m(*b)), batch, n=len(users))
    expected = {k: g.new_zeros(5, *g.shape[1:]).index_add(0, users, g) for k, g in rows.items()}
    with persample.record(model, n=5, sample_ids=users, lean=lean) as tape:
        tape.backward(flat_loss(model(*batch)))
    sizes = sum(g.abs().square().reshape(5, -1).sum(1) for g in expected.values())
    torch.testing.assert_close(tape.norms(), torch.as_tensor(sizes).sqrt())
    assert relative_error(tape.grads(), expected) < 1e-9


def test_an_input_that_is_the_ids_needs_no_constants() -> None:
    """A graph's batch vector, which pools nodes by counts of its own."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x: Tensor, batch: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(batch, 3).T.double() @ self.layer(x)

    torch.manual_seed(0)
    model, x = Pooled(), torch.randn(7, 3).double()
    batch = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    with persample.record(model, n=3, sample_ids=batch) as tape:
        tape.backward(model(x, batch).square().sum(1))
    with persample.record(model, n=3, sample_ids=batch, constants="batch") as told:
        told.backward(model(x, batch).square().sum(1))
    assert relative_error(tape.grads(), told.grads()) == 0


def test_rows_that_the_caller_flattened_are_pointed_out() -> None:
    """Words of all texts in one tensor: the refusal says how to group them, and that works."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 5, 3).double()

    def losses() -> Tensor:
        return model(x.flatten(0, 1)).view(4, -1).square().sum(1)

    with pytest.raises(persample.MixedSamplesError) as error, persample.record(model) as tape:
        tape.backward(losses())
    assert "record(..., n=4, sample_ids=torch.arange(20) % 4), or // 5" in error.value.fix
    with persample.record(model, n=4, sample_ids=torch.arange(20) // 5) as tape:
        tape.backward(losses())
    expected = oracle(model, lambda m, b: m(b.flatten(0, 1)).view(1, -1).square().sum(1), x)
    assert relative_error(tape.grads(), expected) < 1e-12


def test_an_input_that_shares_its_name_is_named_by_its_tensor() -> None:
    """The first input has this name, too: ``constants=("input",)`` would leave no samples."""
    torch.manual_seed(0)
    parts = nn.ModuleDict({"image": nn.Linear(4, 3), "text": nn.Embedding(5, 3)}).double()
    x, words = torch.randn(4, 4).double(), torch.randint(5, (4, 3))

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return (parts["image"](x) @ parts["text"](words).mean(1).T).square().sum(1)

    with pytest.raises(persample.MixedSamplesError) as error, persample.record(parts) as tape:
        tape.backward(losses(parts, x))
    assert "constants=('input',)" not in error.value.fix
    with persample.record(parts, constants=(words,)) as tape:
        tape.backward(losses(parts, x))
    assert relative_error(tape.grads(), oracle(parts, losses, x)) < 1e-12
