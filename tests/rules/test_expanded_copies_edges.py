"""Corners of operators that run on copies, and of the rules beside them."""

from __future__ import annotations

from collections.abc import Callable
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


def backwards(x: Tensor) -> Tensor:
    """Samples in another order than they came."""
    return torch.arange(x.size(0)).flip(0)


def added_to_copies(s: Any, x: Tensor) -> Tensor:
    made = s.w.sin().expand(x.size(0), D).clone()
    made.index_add_(0, backwards(x), x[:, 0])
    return made[backwards(x)].sin()


def scattered_to_copies(s: Any, x: Tensor) -> Tensor:
    made = s.w.expand(x.size(0), D).clone()
    made.scatter_add_(0, backwards(x).unsqueeze(1).expand(-1, D), x[:, 0])
    return made[backwards(x)].sin()


def put_by_name(s: Any, x: Tensor) -> Tensor:
    rows = torch.arange(x.size(0))
    return torch.index_put(x, indices=(rows, rows % 2), values=s.w).sin()


def empty_region(s: Any, x: Tensor) -> Tensor:
    x = x.sin()
    x[..., 2:2] = s.w
    return x * s.v


def heads(x: Tensor, count: int) -> Tensor:
    return x.unsqueeze(1) * torch.arange(1, count + 1).to(x).view(-1, 1, 1)


CASES: dict[str, tuple[Run, dict[str, tuple[int, ...]]]] = {
    "added to copies in place": (added_to_copies, {"w": (D,)}),
    "scattered to copies in place": (scattered_to_copies, {"w": (D,)}),
    "index_put by name": (put_by_name, {"w": (D,)}),
    "nothing is written": (empty_region, {"w": (T, 0), "v": (D,)}),
    "dots in three terms": (
        lambda s, x: torch.einsum("b...i,ij,b...j->b...i", x, s.w, x.sin()), {"w": (D, D)}),
    "fewer heads of keys": (
        lambda s, x: F.scaled_dot_product_attention(heads(x, 4), s.w, s.v, enable_gqa=True),
        {"w": (2, 3, D), "v": (2, 3, D)}),
    "fewer heads, expanded": (
        lambda s, x: F.scaled_dot_product_attention(
            heads(x, 4), s.w.expand(x.size(0), -1, -1, -1), s.w.expand(x.size(0), -1, -1, -1),
            enable_gqa=True),
        {"w": (2, 3, D)}),
    "a number without axes to permute": (
        lambda s, x: torch.maximum(x, s.w.permute(()) * 2).sin(), {"w": ()}),
    "rows without width, repeated": (
        lambda s, x: torch.cat(
            [F.embedding(torch.zeros(x.size(0), 1, dtype=torch.long), s.w).expand(-1, T, -1), x], 2
        ) * s.v,
        {"w": (3, 0), "v": (D,)}),
}  # fmt: skip


def expect_right(model: nn.Module, batch: Tensor) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return flat_loss(model(batch))

    expected = oracle(model, loss, batch)
    norms = torch.cat([rows.view(len(batch), -1) for rows in expected.values()], 1).norm(dim=1)
    for lean in (False, True):
        with persample.record(model, lean=lean) as tape:
            tape.backward(loss(model, batch))
        torch.testing.assert_close(tape.norms(), norms, rtol=1e-8, atol=1e-12)
        if not lean:
            assert relative_error(tape.grads(), expected) < 1e-8


@pytest.mark.parametrize("n", [1, 3, T])
@pytest.mark.parametrize("name", CASES)
def test_corners(name: str, n: int) -> None:
    torch.manual_seed(0)
    run, given = CASES[name]
    parts = {key: nn.Parameter(torch.randn(shape) * 0.3) for key, shape in given.items()}
    expect_right(Fn(run, **parts).double(), torch.randn(n, T, D, dtype=torch.float64))


COMPLEX: dict[str, Run] = {
    "rows of a real table": lambda s, x: x * F.embedding(torch.zeros(x.shape[:2]).long(), s.w),
    "joined rows of a real table": lambda s, x: torch.cat(
        [F.embedding(torch.zeros(x.size(0), 2).long(), s.w), x], 1
    ),
    "einsum of a real weight": lambda s, x: torch.einsum("bti,k->btik", x, s.w[0]),
    "a norm of complex rows": lambda s, x: F.rms_norm(x, (D,), s.w[0]),
    "a complex factor": lambda s, x: torch.sub(torch.add(x, s.v, alpha=1j), s.v, alpha=2 + 3j),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_data_meet_parameters(name: str) -> None:
    torch.manual_seed(0)
    members = {"w": nn.Parameter(torch.randn(3, D, dtype=torch.float64))}
    if name == "a complex factor":
        members = {"v": nn.Parameter(torch.randn(D, dtype=torch.complex128))}
    model = Fn(lambda s, x: COMPLEX[name](s, x) + (1 + 2j), **members)
    expect_right(model, torch.randn(3, T, D, dtype=torch.complex128))


def test_terms_of_different_dtypes() -> None:
    """Torch multiplies them where nothing is summed over."""
    model = Fn(
        lambda s, x: torch.einsum("bti,k,bt->btik", x, s.w, x[..., 0].sin()),
        w=nn.Parameter(torch.randn(1, dtype=torch.float64)),
    )
    batch = torch.randn(3, T, D)
    expected = oracle(model, lambda m, b: flat_loss(m(b)), batch)
    with persample.record(model) as tape:
        tape.backward(flat_loss(model(batch)))
    assert relative_error(tape.grads(), expected) < 1e-5


def test_inner_products_of_rows_in_different_dtypes() -> None:
    """Both uses are of a parameter in single precision, which met data in double."""
    model = Fn(
        lambda s, x: F.pairwise_distance(x, s.w, keepdim=True) + (x * s.w).sum(-1, True),
        w=nn.Parameter(torch.randn(T, D)),
    )
    batch = torch.randn(3, T, D, dtype=torch.float64)
    expected = oracle(model, lambda m, b: flat_loss(m(b)), batch)["w"].flatten(1)
    with persample.record(model) as tape:
        tape.backward(flat_loss(model(batch)))
    torch.testing.assert_close(tape.gram().float(), expected @ expected.T, rtol=1e-4, atol=1e-5)


def test_distances_of_narrow_rows_under_autocast() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.cdist(s.layer(x[:, 0]), s.w)

    torch.manual_seed(0)
    model, batch = Fn(run, layer=nn.Linear(D, D), w=par(30, D)), torch.randn(3, T, D)
    expected = oracle(model, lambda m, b: flat_loss(m(b)), batch)
    with persample.record(model) as tape:
        tape.backward(flat_loss(model(batch)))
    assert relative_error(tape.grads(), expected) < 0.02


def test_division_by_small_half_precision_numbers() -> None:
    """Their squares vanish, the quotient does not overflow."""
    small = torch.full((D,), 2e-4).half()
    model, batch = Fn(lambda s, x: x / s.w, w=nn.Parameter(small)), torch.full((2, D), 1e-4).half()
    with persample.record(model) as tape:
        tape.backward(model(batch).float().sum(1))
    expected = -1e-4 / 4e-8
    torch.testing.assert_close(
        tape.grads()["w"].float(), torch.full((2, D), expected), rtol=2e-2, atol=0
    )


SPREAD: dict[str, Run] = {
    "matmul of a weight for each": lambda s, x: x @ s.w[: x.size(0)],
    "distance": lambda s, x: F.pairwise_distance(x, s.w[0, 0], keepdim=True),
    "einsum": lambda s, x: torch.einsum("bti,ik->bt", x, s.w[0]),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e300])
@pytest.mark.parametrize("name", SPREAD)
def test_others_stay_exact_in_the_generic_rule(name: str, value: float) -> None:
    torch.manual_seed(0)
    model = Fn(SPREAD[name], w=par(3, D, D)).double()
    batch = torch.randn(3, T, D, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(flat_loss(model(batch)))
    assert {use.rule for use in tape.explain().uses} == {"generic"}
    clean = tape.grads()["w"]
    batch[1, 2, 0] = value
    with persample.record(model) as tape:
        tape.backward(flat_loss(model(batch)))
    torch.testing.assert_close(tape.grads()["w"][[0, 2]], clean[[0, 2]])
    assert tape.norms()[[0, 2]].isfinite().all()


def test_positions_of_looked_up_rows() -> None:
    """A sample's rows and its positions may be answered by different rules."""
    torch.manual_seed(0)
    index = torch.randint(3, (T, D))
    model = Fn(
        lambda s, x: torch.minimum(x.movedim(0, -1), F.embedding(index, s.w)).movedim(-1, 0),
        w=par(3, 1),
    ).double()
    batch = torch.randn(1, T, D, dtype=torch.float64)
    with persample.record(model, positions=True) as tape:
        tape.backward(flat_loss(model(batch)))
    torch.testing.assert_close(tape.positions().sum(1), tape.norms().square())
