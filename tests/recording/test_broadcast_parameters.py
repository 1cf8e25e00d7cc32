"""Parameters repeated for every sample before they meet data: latents, queries, learned states."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample
from persample.forms import Pullback, Replay, Total
from persample.testing import oracle, relative_error

from ..forms.test_derived_parameters import flat, losses, recorded
from ..models import Fn, par

N, K, D = 3, 4, 6
OPTIONS: list[dict[str, Any]] = [{}, {"lean": True}, {"budget": 1}]
Case = tuple[nn.Module, Tensor]


def attended(q: Tensor, x: Tensor) -> Tensor:
    return (q @ x.mT).softmax(-1) @ x


def learned(make: Callable[[Any, Tensor], Tensor], **members: Any) -> Case:
    """Queries made of parameters attend to data."""
    members = {"w": par(K, D), "q": nn.Linear(D, D), "norm": nn.LayerNorm(D), **members}
    model = Fn(lambda m, x: attended(make(m, x), x), **members).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model, torch.randn(N, 5, D, dtype=torch.float64)


def layers(m: Any, latents: Tensor) -> Tensor:
    out: Tensor = m.q(m.norm(latents)).tanh()
    return out


def self_attended(m: Any, x: Tensor) -> Tensor:
    queries = m.norm(m.w.unsqueeze(0).repeat(len(x), 1, 1))
    found = F.scaled_dot_product_attention(m.q(queries), queries, queries)
    return queries + found


def in_heads(m: Any, x: Tensor) -> Tensor:
    one, two = m.q(m.w.expand(len(x), -1, -1)).unflatten(-1, (2, 3)).transpose(1, 2).unbind(1)
    return torch.cat([one, two], -1)


def with_positions(m: Any, x: Tensor) -> Tensor:
    """Constants that are expanded, and a matrix for them."""
    return F.linear(m.c.expand(len(x), -1, -1), m.q.weight)


CASES: dict[str, Callable[[], Case]] = {
    "expanded": lambda: learned(lambda m, x: layers(m, m.w.expand(len(x), -1, -1))),
    "expanded, one axis of one": lambda: learned(
        lambda m, x: layers(m, m.w.expand(len(x), K, D)), w=par(1, K, D)),
    "expanded twice": lambda: learned(
        lambda m, x: layers(m, m.w.expand(len(x), K, D)), w=par(1, D)),
    "broadcast": lambda: learned(
        lambda m, x: layers(m, torch.broadcast_to(m.w, (len(x), K, D)))),
    "expanded as another": lambda: learned(
        lambda m, x: layers(m, m.w.expand_as(torch.empty(len(x), K, D)))),
    "repeated": lambda: learned(lambda m, x: layers(m, m.w.repeat(len(x), 1, 1))),
    "tiled": lambda: learned(lambda m, x: layers(m, m.w.tile(len(x), 1, 1))),
    "turned, repeated and viewed": lambda: learned(
        lambda m, x: m.q(m.w.mT.tanh().repeat(len(x), 1, 1).view(-1, K).view(-1, D, K).mT)),
    "repeated, nothing else": lambda: learned(lambda m, x: m.w.repeat(len(x), 1, 1)),
    "rows repeated": lambda: learned(
        lambda m, x: layers(m, m.w.repeat(len(x), 1)).view(len(x), K, D)),
    "derived, expanded": lambda: learned(
        lambda m, x: m.q(m.w).tanh().expand(len(x), -1, -1)),
    "derived, both": lambda: learned(
        lambda m, x: layers(m, m.q(m.w).tanh().expand(len(x), -1, -1))),
    "attention among them": lambda: learned(self_attended),
    "heads": lambda: learned(in_heads),
    "two of them": lambda: learned(
        lambda m, x: layers(m, m.w.expand(len(x), -1, -1)) * m.v.repeat(len(x), 1, 1),
        v=par(K, D)),
    "used before and after": lambda: learned(
        lambda m, x: (lambda r: layers(m, r) + r * x.mean(1, True))(m.w.repeat(len(x), 1, 1))),
    "looked up": lambda: learned(
        lambda m, x: layers(m, m.e(m.i.expand(len(x), -1))),
        e=nn.Embedding(7, D), i=torch.tensor([1, 5, 1, 2])),
    "constants": lambda: learned(with_positions, c=torch.randn(K, D)),
    "constants with a row for each": lambda: learned(
        lambda m, x: layers(m, torch.full((len(x), K, D), 0.5, dtype=x.dtype) + m.c),
        c=torch.randn(K, D)),
    "zeros like them": lambda: learned(
        lambda m, x: (lambda q: q + m.q(torch.zeros_like(q)))(m.w.repeat(len(x), 1, 1))),
    "a learned state": lambda: (
        Fn(lambda m, x: m.g(x, m.w.tanh().repeat(1, len(x), 1))[0],
           w=par(1, 1, D), g=nn.GRU(D, D, batch_first=True)).double(),
        torch.randn(N, 5, D, dtype=torch.float64)),
}  # fmt: skip


def plain(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    model, _ = learned(lambda m, x: x)
    model.function = function
    return model


def other_axis(m: Any, x: Tensor) -> Tensor:
    """As many positions as samples: what is repeated belongs to all of them."""
    return x + layers(m, m.w[0].repeat(x.shape[1], 1))


def keys_of_all(m: Any, x: Tensor) -> Tensor:
    return x @ layers(m, m.w[0].repeat(5, 1)).T


def other_order(m: Any, x: Tensor) -> Tensor:
    queries = layers(m, m.w.repeat(len(x), 1, 1))
    return attended(queries.flip(0), x.flip(0)).flip(0)


def order_of_one(m: Any, x: Tensor) -> Tensor:
    return attended(layers(m, m.w.repeat(len(x), 1, 1)), x.flip(0)).flip(0)


def both_axes(m: Any, x: Tensor) -> Tensor:
    rows = layers(m, m.w[0].repeat(5, 1))
    return x + rows + (x @ rows.T).mean(2, True)


def different(m: Any, x: Tensor) -> Tensor:
    rows = torch.linspace(0, 1, len(x) * K * D, dtype=x.dtype).view(-1, K, D)
    return attended(layers(m, rows), x)


def prefix_of_each(m: Any, x: Tensor) -> Tensor:
    """As many rows of a prefix as samples, joined to the rows of one sample after another."""
    prefix = m.q(m.w[:1].expand(5, D))
    joined = [torch.cat([prefix, rows]) for rows in x]
    return torch.stack([attended(rows, rows) for rows in joined])


def tokens_of_each(m: Any, x: Tensor) -> Tensor:
    index = torch.zeros(len(x), 1, 1, dtype=torch.long).expand(-1, 5, D)
    tokens = torch.take_along_dim(m.w[:1].unsqueeze(0), index, 0)
    return m.q(torch.cat([tokens, x], 1))


def as_one_axis(m: Any, x: Tensor) -> Tensor:
    """Axes without memory are seen as one: copies that have memory cannot be."""
    rows = m.q(m.w[0].expand(2, len(x), D).view(2 * len(x), D).tanh())
    return x + rows.view(2, len(x), 1, D).sum(0)


UNALIKE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "constants of each sample's own": different,
    "positions": other_axis,
    "keys of all": keys_of_all,
    "another order": other_order,
    "another order of the data": order_of_one,
    "one each, and of all": both_axes,
    "a prefix joined to every sample": prefix_of_each,
    "tokens joined along another axis": tokens_of_each,
    "copies seen as one axis": as_one_axis,
}


def expected(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """One backward pass of the whole program per loss."""
    found = losses(model, x)
    names = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(f, list(names.values()), retain_graph=True, materialize_grads=True)
        for f in found
    ]
    return {k: torch.stack(r) for k, r in zip(names, zip(*rows, strict=True), strict=True)}


def pulled_back(form: Any) -> bool:
    parts = form.forms if isinstance(form, Total) else [form]
    return any(isinstance(getattr(part, "form", part), (Pullback, Replay)) for part in parts)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_repeated_parameters_are_exact(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = CASES[name]()
    want = oracle(model, losses, x)
    tape = recorded(model, x, **options)
    assert relative_error(tape.grads(), want) < 1e-10
    g = torch.cat([rows.flatten(1) for rows in want.values()], 1)
    torch.testing.assert_close(tape.norms(), g.norm(dim=1))
    factors = (0.3 / g.norm(dim=1)).clamp(max=1)
    torch.testing.assert_close(flat(tape.clipped_sum(0.3)), factors @ g)


@pytest.mark.parametrize("name", CASES)
def test_layers_before_any_data_are_ordinary_uses(name: str) -> None:
    """Nothing is walked through once for each sample."""
    model, x = CASES[name]()
    tape = recorded(model, x)
    assert {use.rule for use in tape.explain().uses}.isdisjoint({"generic"})
    names = [k for k, _ in model.named_parameters()]
    kinds = {name: pulled_back(form) for name, form in tape._forms.forms(names).items()}
    assert not any(kinds.values()), kinds


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("name", UNALIKE)
def test_copies_that_are_not_the_samples_stay_what_they_are(
    name: str, count: int, options: dict[str, Any]
) -> None:
    """With five samples, there are as many of them as copies."""
    torch.manual_seed(0)
    model, x = plain(UNALIKE[name]), torch.randn(count, 5, D, dtype=torch.float64)
    tape = recorded(model, x, **options)
    want = expected(model, x)
    assert relative_error(tape.grads(), want) < 1e-10
    g = torch.cat([rows.flatten(1) for rows in want.values()], 1)
    torch.testing.assert_close(tape.norms(), g.norm(dim=1))


@pytest.mark.parametrize("options", [{}, {"unproven": "loop"}], ids=str)
@pytest.mark.parametrize("name", ["expanded", "repeated", "attention among them", "looked up"])
def test_verified_and_looped(name: str, options: dict[str, Any]) -> None:
    model, x = CASES[name]()
    assert persample.verify(model, losses, x).ok
    found = recorded(model, x, **options).grads()
    assert relative_error(found, oracle(model, losses, x)) < 1e-10


def test_checkpointed() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        latents = layers(m, m.w.repeat(len(x), 1, 1))

        def inner(latents: Tensor, x: Tensor) -> Tensor:
            return attended(m.q(latents), x) + latents.mean(1, True)

        out: Tensor = checkpoint(inner, latents, x, use_reentrant=False)
        return out + attended(latents, x)

    model, x = plain(forward), torch.randn(N, 5, D, dtype=torch.float64)
    assert relative_error(recorded(model, x).grads(), oracle(model, losses, x)) < 1e-10


def test_some_of_the_parameters() -> None:
    model, x = CASES["expanded"]()
    want = oracle(model, losses, x)
    for chosen in (["w"], ["norm.weight", "q.bias"]):
        found = recorded(model, x, params=chosen).grads()
        assert set(found) == set(chosen)
        assert relative_error(found, {k: want[k] for k in chosen}) < 1e-10


def test_random_numbers_are_drawn_as_without() -> None:
    def make(m: Any, x: Tensor) -> Tensor:
        return layers(m, F.dropout(m.w.repeat(len(x), 1, 1), 0.5))

    model, x = learned(make)
    torch.manual_seed(3)
    want = expected(model, x)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    found = recorded(model, x).grads()
    assert torch.equal(torch.get_rng_state(), after)
    assert relative_error(found, want) < 1e-10


def test_buffers_are_updated_once() -> None:
    def make(m: Any, x: Tensor) -> Tensor:
        rows = F.batch_norm(m.w.repeat(len(x), 1), m.mean, m.var, training=True)
        return rows.view(len(x), K, D)

    buffers = {"mean": torch.zeros(D), "var": torch.ones(D)}
    model, x = learned(make, **buffers)
    recorded(model, x)
    other, x = learned(make, **{k: b.clone() for k, b in buffers.items()})
    other.load_state_dict(model.state_dict())
    other.mean.zero_()
    other.var.fill_(1)
    losses(other, x)
    torch.testing.assert_close(model.mean, other.mean)
    torch.testing.assert_close(model.var, other.var)


@pytest.mark.parametrize("unseen", [False, True])
def test_constants_written_to_before_data_are_met(unseen: bool) -> None:
    def make(m: Any, x: Tensor) -> Tensor:
        scale = torch.full((D,), 2.0, dtype=x.dtype)
        latents = m.q(m.w.repeat(len(x), 1, 1)) + scale
        if unseen:
            scale.numpy()[:] = 5.0
        else:
            scale.fill_(5.0)
        return latents

    model, x = learned(make)
    if unseen:
        with pytest.raises(persample.StaleError, match="written to unseen"):
            recorded(model, x).norms()
        return
    assert relative_error(recorded(model, x).grads(), expected(model, x)) < 1e-10


def test_written_to_before_data_are_met() -> None:
    def make(m: Any, x: Tensor) -> Tensor:
        latents = m.q(m.w.repeat(len(x), 1, 1))
        latents.mul_(2)
        other = m.norm(m.w.repeat(len(x), 1, 1))
        other[:, 0] = 0
        return latents + other

    model, x = learned(make)
    assert relative_error(recorded(model, x).grads(), oracle(model, losses, x)) < 1e-10


def test_hooks_see_what_they_would() -> None:
    def make(m: Any, x: Tensor) -> Tensor:
        latents = m.norm(m.w.repeat(len(x), 1, 1))
        latents.register_hook(lambda g: 3 * g)
        return layers(m, latents)

    model, x = learned(make)
    assert relative_error(recorded(model, x).grads(), expected(model, x)) < 1e-10


def test_a_hook_that_comes_too_late_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        latents = m.norm(m.w.repeat(len(x), 1, 1))
        out = attended(latents, x)
        latents.register_hook(lambda g: 3 * g)
        return out

    model, x = plain(forward), torch.randn(N, 5, D, dtype=torch.float64)
    with pytest.raises(persample.UsageError, match="used already"):
        recorded(model, x)


def test_samples_on_another_axis() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        latents = layers(m, m.w.unsqueeze(1).expand(-1, x.shape[1], -1))
        return attended(latents.transpose(0, 1), x.transpose(0, 1))

    model, x = plain(forward), torch.randn(5, N, D, dtype=torch.float64)
    with persample.record(model, dim=1) as tape:
        tape.backward(losses(model, x))
    assert relative_error(tape.grads(), expected(model, x)) < 1e-10
    assert {use.rule for use in tape.explain().uses}.isdisjoint({"generic"})


def test_samples_in_another_order() -> None:
    """As many copies as rows, but row i is not sample i's."""

    def forward(m: Any, x: Tensor) -> Tensor:
        picked = layers(m, m.w.repeat(len(x), 1, 1))[x[:, :K, 0] > -9]
        return attended(picked.view(-1, K, D), x)

    model, x = plain(forward), torch.randn(N, 5, D, dtype=torch.float64)
    ids = torch.tensor([2, 0, 1])
    found = recorded(model, x, n=N, sample_ids=ids).grads()
    assert relative_error({k: g[ids] for k, g in found.items()}, expected(model, x)) < 1e-10


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_no_change(value: float) -> None:
    model, x = CASES["repeated"]()
    with torch.no_grad():
        model.w[0, 0] = value
    assert recorded(model, x).nonfinite().tolist() == [0, 1, 2]


def test_nothing_is_held_after_the_block() -> None:
    held: list[weakref.ref[Tensor]] = []

    def make(m: Any, x: Tensor) -> Tensor:
        latents = layers(m, m.w.repeat(len(x), 1, 1))
        held.append(weakref.ref(latents))
        return latents

    model, x = learned(make)
    tape = recorded(model, x)
    gc.collect()
    assert held[0]() is None
    tape.norms()
