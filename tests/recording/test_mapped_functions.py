"""``torch.vmap`` over samples in forward: followed as the loop that it stands for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import apis

import persample
from persample.testing import oracle, relative_error

from ..models import Fn, par

N = 4  # samples, and features
NATIVE = apis.__dict__["vmap_impl"]


def scan(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * b, a + b.tanh()


def pairs(h: Tensor) -> Tensor:
    one, two = torch.vmap(scan)(h[:, :2], h[:, 2:])
    return torch.cat([one, two], 1)


def nested(h: Tensor) -> Tensor:
    return torch.vmap(torch.vmap(lambda v: v * v.tanh()))(h)


def ensemble(m: nn.Module, h: Tensor) -> Tensor:
    """One layer with each member's own weights."""
    return torch.vmap(
        lambda w, b: torch.func.functional_call(m.inner, {"weight": w, "bias": b}, (h,))
    )(m.e, m.v.expand(3, -1)).amax(0)


FOLLOWED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "rows": lambda m, h: torch.vmap(lambda r: r.softmax(0) * r)(h),
    "columns": lambda m, h: torch.vmap(lambda c: c.tanh() + 1, 1, 1)(h),
    "two arguments, two results": lambda m, h: pairs(h),
    "nested": lambda m, h: nested(h),
    "an argument for all": lambda m, h: torch.vmap(lambda r, w: r @ w, (0, None))(h, m.w),
    "a parameter that is not passed": lambda m, h: torch.vmap(lambda r: m.w @ r)(h),
    "a layer": lambda m, h: torch.vmap(m.inner)(h),
    "a parameter's rows": lambda m, h: torch.vmap(lambda w, c: c * w, (0, 1), 1)(m.v, h),
    "an ensemble": lambda m, h: torch.vmap(lambda w: (h @ w).tanh())(m.e).mean(0),
    "an ensemble of layers": lambda m, h: ensemble(m, h),
    "a weight made of parameters alone": lambda m, h: h @ torch.vmap(torch.diag)(m.w).sum(0),
    "in chunks": lambda m, h: torch.vmap(lambda r: r.exp(), chunk_size=2)(h),
    "behind, with a keyword": lambda m, h: torch.vmap(lambda r, k: r * k)(h, k=2.0),
    "out_dims last": lambda m, h: torch.vmap(lambda r: r.cos(), out_dims=-1)(h).mT,
    "a dictionary": lambda m, h: torch.vmap(lambda d: {"a": d["x"] * 2})({"x": h})["a"],
}


def build(function: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    net = Fn(
        lambda s, x: s.last(function(s, s.first(x))), first=nn.Linear(N, N), last=nn.Linear(N, 2),
        inner=nn.Linear(N, N), w=par(N, N), v=par(N), e=par(3, N, N),
    )  # fmt: skip
    return net.double()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("n", [1, 3, N])
@pytest.mark.parametrize("name", FOLLOWED)
def test_exact(name: str, n: int, lean: bool) -> None:
    model, x = build(FOLLOWED[name]), torch.randn(n, N, dtype=torch.float64)
    plain = loss(model, x)
    with persample.record(model, lean=lean) as tape:
        losses = loss(model, x)
        tape.backward(losses)
    assert torch.allclose(losses, plain, rtol=1e-12)
    expected = oracle(model, loss, x)
    if not lean:
        assert relative_error(tape.grads(), expected) < 1e-10
    norms = torch.cat([g.flatten(1) for g in expected.values()], 1).norm(dim=1)
    assert torch.allclose(tape.norms().double(), norms, rtol=1e-5)


def test_samples_that_interact_inside_are_refused() -> None:
    model = build(lambda m, h: torch.vmap(lambda c: c - c.mean(), 1, 1)(h))
    with pytest.raises(persample.MixedSamplesError) as caught, persample.record(model) as tape:
        tape.backward(loss(model, torch.randn(3, N, dtype=torch.float64)))
    assert "c.mean()" in caught.value.where


def test_the_whole_model_with_its_inputs_marked() -> None:
    model = nn.Sequential(nn.Linear(N, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(3, N, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.mark(x)
        tape.backward(torch.vmap(model)(x).square().sum(1))
    assert relative_error(tape.grads(), oracle(model, loss, x)) < 1e-10


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_numbers_are_left_alone(randomness: str) -> None:
    """A loop would draw others: the map runs as it is, and is refused."""
    model = build(
        lambda m, h: torch.vmap(lambda r: r * torch.rand_like(r), randomness=randomness)(h)
    )
    x = torch.randn(3, N, dtype=torch.float64)
    torch.manual_seed(1)
    model(x)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    with pytest.raises(persample.MixedSamplesError), persample.record(model) as tape:
        tape.backward(loss(model, x))
    assert torch.equal(torch.get_rng_state(), state)


def test_constants_are_mapped_by_torch() -> None:
    """Masks made of positions would be a loop over every pair of them."""
    calls = []

    def causal(q: Tensor, k: Tensor) -> Tensor:
        calls.append(0)
        return q >= k

    def masked(m: nn.Module, h: Tensor) -> Tensor:
        at = torch.arange(N)
        mask = torch.vmap(torch.vmap(causal, (None, 0)), (0, None))(at, at)
        return h @ mask.double()

    model, x = build(masked), torch.randn(3, N, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(loss(model, x))
    assert len(calls) == 1
    assert relative_error(tape.grads(), oracle(model, loss, x)) < 1e-10


def test_nothing_is_left() -> None:
    model, x = build(FOLLOWED["rows"]), torch.randn(3, N, dtype=torch.float64)
    outer, inner = persample.record(model), persample.record(nn.Linear(2, 2))
    with outer:
        assert apis.__dict__["vmap_impl"] is not NATIVE
        with inner:
            pass
        assert apis.__dict__["vmap_impl"] is not NATIVE
    assert apis.__dict__["vmap_impl"] is NATIVE
    with pytest.raises(KeyError), persample.record(model):
        raise KeyError
    assert apis.__dict__["vmap_impl"] is NATIVE
    assert model(x).shape == (3, 2)


def test_other_threads_keep_their_own() -> None:
    model, x = build(FOLLOWED["rows"]), torch.randn(3, N)
    calls: list[Any] = []

    def work() -> None:
        torch.vmap(lambda r: calls.append(0) or r * 2)(x)  # type: ignore[func-returns-value]

    with persample.record(model):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(calls) == 1


def test_wrong_arguments_are_torchs_errors() -> None:
    model = build(lambda m, h: torch.vmap(lambda r: r, in_dims=3)(h))
    with persample.record(model), pytest.raises(ValueError, match="in_dim"):
        model(torch.randn(3, N, dtype=torch.float64))
    model = build(lambda m, h: torch.vmap(lambda r: (r, r), out_dims=(0, 0, 0))(h)[0])
    with persample.record(model), pytest.raises(ValueError, match="out_dims"):
        model(torch.randn(3, N, dtype=torch.float64))


TORCH_REFUSES: dict[str, Callable[[Tensor], Any]] = {
    "no axis for mapped results": lambda h: torch.vmap(lambda r: r * 2, out_dims=None)(h),
    "a branch": lambda h: torch.vmap(lambda r: r if r.sum() > 0 else -r)(h),
    "a number": lambda h: torch.vmap(lambda r: r * r.sum().item())(h),
    "random numbers": lambda h: torch.vmap(lambda r: r * torch.rand_like(r))(h),
    "a result that is no tensor": lambda h: torch.vmap(lambda r: (r, 2))(h)[0],
}


@pytest.mark.parametrize("name", TORCH_REFUSES)
def test_what_torch_refuses_is_refused(name: str) -> None:
    model, x = build(lambda m, h: TORCH_REFUSES[name](h)), torch.randn(3, N, dtype=torch.float64)
    with pytest.raises((RuntimeError, ValueError)) as native:
        model(x)
    with persample.record(model), pytest.raises(type(native.value)) as found:
        model(x)
    assert str(found.value) == str(native.value)


def test_a_function_that_counts_its_calls_is_refused() -> None:
    calls: list[int] = []
    model = build(lambda m, h: torch.vmap(lambda r: calls.append(0) or r * len(calls))(h))  # type: ignore[func-returns-value]
    with pytest.raises(persample.MixedSamplesError), persample.record(model) as tape:
        tape.backward(loss(model, torch.randn(3, N, dtype=torch.float64)))


def test_constants_that_are_not_mapped_need_no_axis() -> None:
    def doubled(m: nn.Module, h: Tensor) -> Tensor:
        rows, other = torch.vmap(lambda r: (r * 2, m.w * 2), out_dims=(0, None))(h)
        return rows @ other

    model, x = build(doubled), torch.randn(3, N, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(loss(model, x))
    assert relative_error(tape.grads(), oracle(model, loss, x)) < 1e-10


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "masks": lambda x: torch.vmap(lambda r: r.double())(x > 0).mean(0),
    "integers": lambda x: torch.vmap(lambda r: r * 2)((x * 3).long()).double().mean(0),
    "random numbers allowed": lambda x: torch.vmap(lambda r: r * 2, randomness="different")(x).mean(
        0
    ),
}


@pytest.mark.parametrize("name", COUPLED)
def test_statistics_of_what_was_mapped_are_refused(name: str) -> None:
    model = build(lambda m, h: h * COUPLED[name](h.detach()))
    for _ in range(2):
        with pytest.raises(persample.PersampleError), persample.record(model) as tape:
            tape.backward(model(torch.randn(N, N).double()).square().sum(1))


def test_masks_of_each_sample_stay_exact() -> None:
    model = build(lambda m, h: h * torch.vmap(lambda r: r.double())(h > 0))
    x = torch.randn(N, N).double()

    def losses(m: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = m(batch).square().sum(1)
        return out

    with persample.record(model) as tape:
        tape.backward(losses(model, x))
    assert relative_error(tape.grads(), oracle(model, losses, x)) < 1e-10


def test_results_have_the_strides_of_torch() -> None:
    linear, x = nn.Linear(5, 3), torch.randn(6, 5)

    def losses(h: Tensor) -> Tensor:
        doubled = torch.vmap(lambda r: r * 2, out_dims=1)(h).t()
        return doubled.view(-1).view(-1, 3).sum(1)

    losses(linear(x))
    with persample.record(linear) as tape:
        tape.backward(losses(linear(x)))
    assert tape.norms().shape == (6,)
