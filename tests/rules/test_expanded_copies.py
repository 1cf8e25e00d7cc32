"""Parameters that meet samples by copies: one backward pass of the operator serves all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error

from ..models import Fn, flat_loss, par

T, D = 4, 5
Run = Callable[[Any, Tensor], Tensor]


def mask(x: Tensor) -> Tensor:
    """Which positions of a sample are masked: its own data decide."""
    return x[..., 0] > 0


def set_masked(s: Any, x: Tensor) -> Tensor:
    x = x.sin()
    x[mask(x)] = s.w
    return x.cos()


def set_slice(s: Any, x: Tensor) -> Tensor:
    x = x.sin()
    x[:, 1:3] = s.w
    x[:, 0, 2] = s.w[1]
    return x.cos()


def put(s: Any, x: Tensor) -> Tensor:
    x = x.sin()
    rows = torch.arange(x.size(0))
    return x.index_put((rows, rows % T), s.w).cos()


def in_place(s: Any, x: Tensor) -> Tensor:
    x = x.sin()
    x *= s.w
    x += s.v
    x.div_(s.w.square() + 1)
    return x.pow_(2).cos()


def prompts(s: Any, x: Tensor) -> Tensor:
    made = s.layer(s.w).tanh()
    return torch.cat([made.expand(x.size(0), -1, -1), x], 1).sin()


def copies(x: Tensor) -> Tensor:
    """One row for every sample, not a number for each of them."""
    return torch.zeros(x.size(0), 2, dtype=torch.long)


CASES: dict[str, tuple[Run, dict[str, Any]]] = {
    "maximum": (lambda s, x: torch.maximum(x, s.w).sin(), {"w": (D,)}),
    "max of two": (lambda s, x: torch.max(s.w, x).sin(), {"w": (D,)}),
    "min of two": (lambda s, x: x.min(s.w).sin(), {"w": (T, 1)}),
    "clamp": (lambda s, x: x.clamp(s.w - 1, s.w.square() + 1).sin(), {"w": (D,)}),
    "power": (lambda s, x: x.exp() ** s.w, {"w": (D,)}),
    "base": (lambda s, x: (s.w.exp() + 1) ** x, {"w": (1,)}),
    "lerp": (lambda s, x: torch.lerp(x, x.cos(), s.w), {"w": (T, D)}),
    "lerp of parameters": (lambda s, x: torch.lerp(s.w, s.v, x), {"w": (D,), "v": (T, 1)}),
    "addcmul": (lambda s, x: torch.addcmul(s.w, x, s.v, value=2).sin(), {"w": (D,), "v": (T, 1)}),
    "logaddexp": (lambda s, x: torch.logaddexp(x, s.w), {"w": (D,)}),
    "atan2": (lambda s, x: torch.atan2(x, s.w), {"w": (T, D)}),
    "where": (lambda s, x: torch.where(mask(x).unsqueeze(-1), s.w, x).sin(), {"w": (D,)}),
    "where of two": (lambda s, x: torch.where(x > 0, s.w, s.v).sin(), {"w": (D,), "v": (1, 1)}),
    "a number": (lambda s, x: torch.where(x > 0, s.w, x).sin(), {"w": ()}),
    "masked_fill": (lambda s, x: x.masked_fill(x > 0, s.w).sin(), {"w": ()}),
    "masked_fill of a parameter": (
        lambda s, x: s.w.expand_as(x).masked_fill(x > 0, 0.5) * x, {"w": (D,)}),
    "transposed": (lambda s, x: torch.maximum(x.transpose(0, 1), s.w).transpose(0, 1).sin(),
                   {"w": (T, 1, D)}),
    "folded": (lambda s, x: torch.maximum(x.flatten(0, 1), s.w).view(x.shape).sin(), {"w": (D,)}),
    "prelu": (lambda s, x: F.prelu(x, s.w).sin(), {"w": (1,)}),
    "prelu by channel": (lambda s, x: F.prelu(x, s.w).sin(), {"w": (T,)}),
    "prelu of a batch of vectors": (lambda s, x: F.prelu(x[:, 0], s.w).sin(), {"w": (D,)}),
    "in place": (in_place, {"w": (D,), "v": (T, D)}),
    "set masked": (set_masked, {"w": (D,)}),
    "set slices": (set_slice, {"w": (D,)}),
    "index_put": (put, {"w": (D,)}),
    "stack": (lambda s, x: torch.stack([s.w.expand(x.size(0), D), x[:, 0]], 1).sin(), {"w": (D,)}),
    "stack between": (
        lambda s, x: torch.stack([x[:, 0], s.w.expand(x.size(0), D)], 2).sin(), {"w": (D,)}),
    "looked-up class tokens": (
        lambda s, x: torch.cat([F.embedding(copies(x), s.w), x], 1).sin(), {"w": (3, D)}),
    "repeated class tokens": (
        lambda s, x: torch.cat([s.w.repeat(x.size(0), 1, 1), x], 1).sin(), {"w": (1, 2, D)}),
    "repeated along two axes": (
        lambda s, x: torch.cat([s.w.repeat(x.size(0), 2, 1), x], 1).sin(), {"w": (1, D)}),
    "prompts": (prompts, {"w": (2, 3), "layer": lambda: nn.Linear(3, D)}),
    "cdist": (lambda s, x: torch.cdist(x, s.w), {"w": (3, D)}),
    "cdist of rows": (
        lambda s, x: torch.cdist(x.flatten(0, 1), s.w).view(-1, T, 3), {"w": (3, D)}),
    "cdist of few": (lambda s, x: torch.cdist(x[:, 0], s.w), {"w": (30, D)}),
    "cdist, exactly": (
        lambda s, x: torch.cdist(
            x.flatten(0, 1), s.w, compute_mode="donot_use_mm_for_euclid_dist"
        ).view(-1, T, 3),
        {"w": (3, D)},
    ),
    "nothing but class tokens": (
        lambda s, x: torch.cat([F.embedding(copies(x), s.w), x[:, :0]], 1).sin(),
        {"w": (3, D)},
    ),
    "no class tokens": (
        lambda s, x: torch.cat([F.embedding(copies(x), s.w).flatten(0, 0)[:, :0], x], 1).sin(),
        {"w": (3, D)},
    ),
    "cdist to rows": (
        lambda s, x: torch.cdist(s.w, x.flatten(0, 1), p=1.5).view(3, -1, T).transpose(0, 1),
        {"w": (3, D)}),
    "cosine similarity": (
        lambda s, x: F.cosine_similarity(x.unsqueeze(2), s.w, dim=-1), {"w": (3, D)}),
    "cosine similarity, axis one": (lambda s, x: F.cosine_similarity(x, s.w), {"w": (1, T, D)}),
    "pairwise distance": (lambda s, x: F.pairwise_distance(x, s.w), {"w": (T, D)}),
    "bias of attention": (
        lambda s, x: F.scaled_dot_product_attention(x, x, x, attn_mask=s.w), {"w": (T, T)}),
    "learned queries": (
        lambda s, x: F.scaled_dot_product_attention(s.w.expand(x.size(0), -1, -1), x, x),
        {"w": (2, D)}),
    "learned keys": (lambda s, x: F.scaled_dot_product_attention(x, s.w, s.v),
                     {"w": (3, D), "v": (3, D)}),
    "planes": (
        lambda s, x: F.grid_sample(
            s.w.expand(x.size(0), -1, -1, -1), x[:, None, :, :2].tanh(), align_corners=False),
        {"w": (2, 3, 3)}),
    "three terms": (lambda s, x: torch.einsum("bti,ij,btj->bti", x, s.w, x.sin()), {"w": (D, D)}),
    "mixture": (
        lambda s, x: torch.einsum("bte,eij,bti->btj", x[..., :2].softmax(-1), s.w, x),
        {"w": (2, D, 3)}),
    "between two constants": (
        lambda s, x: torch.einsum("ki,bti,ij,jl->btkl", torch.ones(2, D).to(x), x, s.w,
                                  torch.eye(3, 4).to(x)), {"w": (D, 3)}),
    "attention, values, weight": (
        lambda s, x: torch.einsum("bts,bsd,de->bte", (x @ x.mT).softmax(-1), x, s.w),
        {"w": (D, 3)}),
    "all beside the gradient": (
        lambda s, x: torch.einsum("bti,bti,i->bt", x, x.sin(), s.w), {"w": (D,)}),
}  # fmt: skip


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    run, given = CASES[name]
    parts = {
        k: v() if callable(v) else nn.Parameter(torch.randn(v) * 0.3) for k, v in given.items()
    }
    return Fn(run, **parts).double()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return flat_loss(model(batch))


@pytest.mark.parametrize("n", [1, 3, T, D, 0])
@pytest.mark.parametrize("name", CASES)
def test_one_pass_for_all_samples(name: str, n: int) -> None:
    model, batch = built(name), torch.randn(n, T, D, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(loss(model, batch))
    rules = {use.rule for use in tape.explain().uses}
    assert "generic" not in rules or n < 2  # which is one pass, too
    if not n:
        assert all(rows.shape[0] == 0 for rows in tape.grads().values())
        return
    expected = oracle(model, loss, batch, n=n)
    assert relative_error(tape.grads(), expected) < 1e-10
    flat = torch.cat([rows.reshape(n, -1) for rows in expected.values()], 1)
    torch.testing.assert_close(tape.norms(), flat.norm(dim=1), rtol=1e-10, atol=1e-12)
    c = torch.rand(n, dtype=torch.float64)
    for key, found in tape.weighted_sum(c).items():
        torch.testing.assert_close(found, torch.tensordot(c, expected[key], 1))
    with persample.record(model, lean=True) as lean:
        lean.backward(loss(model, batch))
    torch.testing.assert_close(lean.norms(), flat.norm(dim=1), rtol=1e-10, atol=1e-12)


def test_copies_that_are_written_to_belong_to_who_writes() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        turned = torch.arange(x.size(0)).flip(0)
        return (
            s.layer(s.w).repeat(x.size(0), 1).clone().index_add_(0, turned, x[:, 0]).cos()[turned]
        )

    model = Fn(run, w=par(1, 3), layer=nn.Linear(3, D)).double()
    batch = torch.randn(3, T, D, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(loss(model, batch))
    assert relative_error(tape.grads(), oracle(model, loss, batch, n=3)) < 1e-10


def test_one_samples_infinity_stays_its_own() -> None:
    model = Fn(lambda s, x: torch.lerp(x, x.cos(), s.w), w=par(D)).double()
    batch = torch.randn(3, T, D, dtype=torch.float64)
    batch[1, 2, 0] = torch.inf
    with persample.record(model) as tape:
        tape.backward(loss(model, batch))
    rows = tape.grads()["w"]
    assert not rows[1].isfinite().all()
    assert rows[[0, 2]].isfinite().all()


def test_a_number_of_another_dtype_decides_nothing() -> None:
    model = Fn(lambda s, x: torch.maximum(x, s.w).sin(), w=nn.Parameter(torch.tensor(0.1).double()))
    batch = torch.randn(3, T, D)
    with persample.record(model) as tape:
        tape.backward(loss(model, batch))
    losses = map(partial(loss, model), batch.split(1))
    expected = [torch.autograd.grad(each, model.w)[0] for each in losses]
    torch.testing.assert_close(tape.grads()["w"], torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_hooks_on_repeated_prompts_are_kept() -> None:
    seen: list[Tensor] = []

    def run(s: Any, x: Tensor) -> Tensor:
        made = s.layer(s.w)
        made.register_hook(lambda g: seen.append(g))
        return torch.cat([made.expand(x.size(0), -1, -1), x], 1).sin()

    model = Fn(run, w=par(2, 3), layer=nn.Linear(3, D)).double()
    batch = torch.randn(3, T, D, dtype=torch.float64)
    expected = oracle(model, loss, batch, n=3)
    with persample.record(model) as tape:
        tape.backward(loss(model, batch))
    assert relative_error(tape.grads(), expected) < 1e-10
