"""Parameters behind tensors that were computed before any sample met them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.forms import Dense, Outer, Part, Picked, Pullback, total, within
from persample.testing import oracle, relative_error

from ..models import Fn, par
from .lengths import sq_bounds

OPTIONS: list[dict[str, Any]] = [{}, {"lean": True}, {"budget": 1}]
Case = tuple[nn.Module, Tensor]


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sin().flatten(1).sum(1)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def recorded(model: nn.Module, x: Tensor, **options: Any) -> persample.Tape:
    with persample.record(model, **options) as tape:
        tape.backward(losses(model, x), retain_graph=True)
    return tape


def is_exact(model: nn.Module, x: Tensor, **options: Any) -> None:
    """Every question against one sample at a time."""
    tape, want = recorded(model, x, **options), oracle(model, losses, x)
    g = torch.cat([rows.flatten(1) for rows in want.values()], 1)
    torch.testing.assert_close(tape.norms(), g.norm(dim=1))
    factors = (0.3 / g.norm(dim=1)).clamp(max=1)
    torch.testing.assert_close(flat(tape.clipped_sum(0.3)), factors @ g)
    assert relative_error(tape.grads(), want) < 1e-10
    c = torch.arange(g.shape[0], dtype=g.dtype)
    torch.testing.assert_close(flat(tape.weighted_sum(c)), c @ g)
    torch.testing.assert_close(flat(tape.variance()), g.var(0))
    direction = {name: torch.randn_like(rows[0]) for name, rows in want.items()}
    torch.testing.assert_close(tape.dots(direction), g @ flat(direction))
    again = {name: Dense(rows) for name, rows in want.items()}
    sketched = sum(
        persample.forms.sums.project_parameter(name, form, 8, 0) for name, form in again.items()
    )
    torch.testing.assert_close(tape.project(8, seed=0), sketched)
    if "lean" not in options:
        torch.testing.assert_close(tape.gram(), g @ g.T)


# ---------------------------------------------------------------------- tables picked from again

AHEAD = torch.arange(5)[None] - torch.arange(5)[:, None]


def relative(table: nn.Embedding, meet: Callable[[Tensor, Tensor], Tensor], *inner: int) -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return meet(x, m.table(AHEAD.clamp(-3, 3) + 3))

    return Fn(forward, table=table).double(), torch.randn(3, *inner, dtype=torch.float64)


TABLES: dict[str, Callable[[], Case]] = {
    "biases": lambda: relative(
        nn.Embedding(7, 2), lambda x, b: x + b.permute(2, 0, 1)[None], 2, 5, 5),
    "biases, padded": lambda: relative(
        nn.Embedding(7, 2, padding_idx=3), lambda x, b: x + b.permute(2, 0, 1), 2, 5, 5),
    "keys": lambda: relative(
        nn.Embedding(7, 4), lambda x, k: torch.einsum("bhid,ijd->bhij", x, k), 2, 5, 4),
    "keys, padded": lambda: relative(
        nn.Embedding(7, 4, padding_idx=6), lambda x, k: torch.einsum("bid,ijd->bij", x, k), 5, 4),
    "two layers": lambda: relative(
        nn.Embedding(7, 4), lambda x, k: torch.einsum("bid,ijd->bij", x, k.tanh()), 5, 4),
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", TABLES)
def test_rows_picked_again_are_exact(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    is_exact(*TABLES[name](), **options)


@pytest.mark.parametrize("name", TABLES)
def test_rows_picked_again_are_added_up_once(name: str) -> None:
    model, x = TABLES[name]()
    tape = recorded(model, x)
    (before,) = tape._forms.forms(["table.weight"]).values()
    assert isinstance(before, Picked)
    assert not before.distinct
    (form,) = tape._forms.written(["table.weight"]).values()
    assert isinstance(form, Picked)
    assert isinstance(form.form, Dense)
    assert form.distinct
    padding = model.table.padding_idx
    assert form.index.tolist() == [k for k in range(7) if k != padding]


def test_rows_picked_again_keep_to_the_budget() -> None:
    model, x = TABLES["keys"]()
    tape = recorded(model, x)
    rows = 3 * 7 * 4 * 8
    with within(2 * rows - 1):
        assert tape._forms.written(["table.weight"]) == tape._forms.forms(["table.weight"])
    with within(2 * rows):
        (form,) = tape._forms.written(["table.weight"]).values()
    assert isinstance(form, Picked)
    assert form.distinct


# ---------------------------------------------------------------------- both ways


def mirrored(weight: nn.Parameter, *inner: int) -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return (x @ m.w).tanh() @ m.w.mT

    return Fn(forward, w=weight).double(), torch.randn(3, *inner, dtype=torch.float64)


WAYS: dict[str, Callable[[], Case]] = {
    "one position": lambda: mirrored(par(6, 4), 6),
    "positions": lambda: mirrored(par(16, 12), 2, 16),
    "square": lambda: mirrored(par(4, 4), 4),
    "square, positions": lambda: mirrored(par(9, 9), 2, 9),
    "linear": lambda: (
        Fn(lambda m, x: F.linear(m.a(x).tanh(), m.a.weight.t()), a=nn.Linear(6, 4)).double(),
        torch.randn(3, 6, dtype=torch.float64),
    ),
    "blocks": lambda: mirrored(par(2, 6, 4), 2, 1, 6),
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_a_matrix_and_its_transpose_are_exact(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    is_exact(*WAYS[name](), **options)


@pytest.mark.parametrize("name", WAYS)
def test_a_matrix_and_its_transpose_are_more_positions_of_one_form(name: str) -> None:
    model, x = WAYS[name]()
    name = "a.weight" if name == "linear" else "w"
    kept = recorded(model, x)
    (form,) = kept._forms.forms([name]).values()
    assert type(form) is Outer
    assert form.t == 2 * x.shape[1:-1].numel() // form.left.shape[1]


def test_balanced_factors_leave_nothing_in_doubt() -> None:
    """Tiny output gradients beside large inputs: norms come from products of positions alone."""
    torch.manual_seed(0)
    n, t = 4, 1
    one = Outer(1e-4 * torch.randn(n, t, 30), 1e3 * torch.randn(n, t, 20), torch.Size((30, 20)))
    two = Outer(1e-4 * torch.randn(n, t, 20), 1e3 * torch.randn(n, t, 30), torch.Size((20, 30)))
    form = total([one, Part(two, torch.Size((30, 20)), (1, 20), 0)])
    assert type(form) is Outer
    exact = (one.dense().double() + two.dense().double().mT).square().sum((1, 2))
    norms = form.norms()
    assert norms.exact is not None
    assert norms.doubt is not None
    assert bool((norms.doubt < 1e-3 * norms.value).all())
    bounds = sq_bounds(form)
    torch.testing.assert_close(norms.value.double(), exact, rtol=1e-5, atol=0)
    assert bool((bounds.double() >= exact).all())
    assert bool((bounds.double() <= 1.01 * exact).all())


@pytest.mark.parametrize("zero", ["left", "right", "both", "huge"])
def test_factors_without_size_stay_as_they_are(zero: str) -> None:
    left, right = torch.ones(2, 1, 3), torch.ones(2, 1, 4)
    if zero in ("left", "both"):
        left[0] = 0
    if zero in ("right", "both"):
        right[0] = 0
    if zero == "huge":
        left[0], right[0] = float("inf"), 1e30
    shape = torch.Size((3, 4))
    form = total(
        [Outer(left, right, shape), Part(Outer(right, left, shape[::-1]), shape, (1, 4), 0)]
    )
    torch.testing.assert_close(form.dense(), 2 * left.mT @ right)


# ---------------------------------------------------------------------- complex weights


def filtered(m: Any, x: Tensor) -> Tensor:
    """A long convolution whose kernel is made of three parameters."""
    poles = torch.complex(-m.a.exp(), m.b)
    kernel = (m.c * torch.exp(poles.unsqueeze(-1) * torch.arange(5))).sum(1).real
    return torch.fft.irfft(torch.fft.rfft(x, n=10) * torch.fft.rfft(kernel, n=10), n=10)[..., :5]


def filters() -> Case:
    model = Fn(filtered, a=par(4, 2), b=par(4, 2), c=par(4, 2, 1)).double()
    return model, torch.randn(3, 4, 5, dtype=torch.float64)


def rotated() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        turn = torch.polar(m.a.exp(), m.b)
        return torch.view_as_real(torch.view_as_complex(x) * turn).flatten(1)

    return Fn(forward, a=par(4), b=par(4)).double(), torch.randn(3, 4, 2, dtype=torch.float64)


def complex_pair() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(torch.complex128) @ (m.a @ m.b))

    a, b = (nn.Parameter(torch.randn(4, 4, dtype=torch.complex128)) for _ in range(2))
    return Fn(forward, a=a, b=b), torch.randn(3, 5, 4, dtype=torch.float64)


COMPLEX = {"filters": filters, "rotated": rotated, "complex pair": complex_pair}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["filters", "rotated"])
def test_complex_weights_are_exact(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    is_exact(*COMPLEX[name](), **options)


@pytest.mark.parametrize("name", COMPLEX)
def test_parameters_of_complex_weights_are_walked_to_together(name: str) -> None:
    torch.manual_seed(0)
    model, x = COMPLEX[name]()
    tape = recorded(model, x)
    names = [key for key, _ in model.named_parameters()]
    assert all(isinstance(form, Pullback) for form in tape._forms.forms(names).values())
    assert all(isinstance(form, Dense) for form in tape._forms.written(names).values())
    assert relative_error(tape.grads(), oracle(model, losses, x)) < 1e-10
    rows = torch.cat([g.flatten(1) for g in oracle(model, losses, x).values()], 1)
    torch.testing.assert_close(tape.norms(), torch.linalg.vector_norm(rows, dim=1))
