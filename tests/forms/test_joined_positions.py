"""Norms of several small layers from products of positions, side by side."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.forms import Form, Outer, position_products
from persample.forms.fast import joined_positions
from persample.forms.fast.joined_positions import Sequences
from persample.forms.fast.stacked import stack_forms


def outer(n: int, t: int, a: int, b: int, dtype: torch.dtype = torch.float64) -> Outer:
    """Outer products of random factors."""
    left, right = torch.randn(n, t, a, dtype=dtype), torch.randn(n, t, b, dtype=dtype)
    return Outer(left, right, torch.Size((a, b)))


def total(forms: Mapping[str, Form]) -> Tensor:
    """‖gᵢ‖² over all forms, from rows in double precision."""
    rows = torch.cat([form.dense().double().flatten(1) for form in forms.values()], 1)
    return rows.square().sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "t"), [(1, 2), (3, 5), (5, 5), (4, 20)])
def test_norms_are_those_of_all_layers(n: int, t: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sides = [(40, 60), (64, 64), (50, 300)]
    forms = {f"{a}": outer(n, t, a, b, dtype) for a, b in sides}
    found = Sequences([*forms.values()]).norms()
    torch.testing.assert_close(found.value.double(), total(forms), rtol=1e-4, atol=0)
    assert (found.surely() >= total(forms)).all()
    assert found.exact is not None
    which = torch.tensor([n - 1, 0])
    torch.testing.assert_close(found.exact(which), total(forms)[which], rtol=1e-6, atol=0)


def test_products_of_one_factor_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, calls = torch.randn(3, 4, 40), []

    def counted(one: Tensor, two: Tensor) -> Tensor:
        calls.append(one)
        return one @ two.mT

    monkeypatch.setattr(position_products, "rows_by_rows", counted)
    forms = {str(k): Outer(torch.randn(3, 4, 40), shared, torch.Size((40, 40))) for k in range(3)}
    norms = Sequences([*forms.values()]).norms().value.double()
    torch.testing.assert_close(norms, total(forms), rtol=1e-4, atol=0)
    assert len(calls) == 4


def test_what_is_joined() -> None:
    """At least two of one n, t and dtype, where products are cheaper than rows and no sum comes."""

    def joined(forms: dict[str, Form], *, sums: bool = False) -> bool:
        return any(isinstance(f, Sequences) for f in stack_forms(forms, sums=sums).values())

    def some(n: int, t: int, a: int, b: int, count: int = 4) -> dict[str, Form]:
        return {str(k): outer(n, t, a, b) for k in range(count)}

    assert joined(some(8, 16, 128, 128))
    assert not joined(some(8, 16, 128, 128), sums=True)
    assert not joined(some(8, 16, 128, 128, 2))  # calls would take longer
    mixed = some(8, 16, 128, 128) | {"other": outer(8, 17, 128, 120)}
    found = stack_forms(mixed, sums=False)
    assert [type(form) for form in found.values()] == [Sequences, Outer]
    for n, t, a, b in ((8, 16, 40, 40), (3, 40, 8, 8), (8, 1, 120, 120), (0, 4, 120, 120)):
        assert not joined(some(n, t, a, b))


class Cancelling(nn.Module):
    """Two layers over sequences; the gradient of the second sample is rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(48, 64, bias=False), nn.Linear(64, 48, bias=False)

    def forward(self, x: Tensor, signs: Tensor) -> Tensor:
        """(n, t, 48) to (n,)."""
        hidden = self.one(x)
        return (self.two(hidden) * signs).sum((1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_positions_that_cancel_are_computed_again(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(joined_positions, "_PAYS", 0)
    torch.manual_seed(0)
    model = Cancelling().to(dtype)
    x = torch.randn(3, 1, 48, dtype=dtype).expand(3, 8, 48).contiguous()
    signs = torch.ones(3, 8, 48, dtype=dtype)
    signs[1, ::2] = -1
    signs[1, 0] *= 1.001  # 1e-3 of one position is left
    with persample.record(model) as tape:
        tape.backward(model(x, signs))
    by = {line.parameter: line.norms for line in tape.explain().uses}
    assert by == {"one.weight": "gram, joined", "two.weight": "gram, joined"}
    exact = Cancelling().double()
    exact.load_state_dict(model.state_dict())
    expected = []
    for i in range(3):
        loss = exact(x[i : i + 1].double(), signs[i : i + 1].double()).sum()
        grads = torch.autograd.grad(loss, list(exact.parameters()))
        expected.append(torch.cat([g.flatten() for g in grads]).norm())
    torch.testing.assert_close(tape.norms().double(), torch.stack(expected), rtol=2e-3, atol=0)
    limit = float(expected[1])
    for i in range(3):
        with persample.record(model) as alone:
            alone.backward(model(x[i : i + 1], signs[i : i + 1]))
        clipped = alone.clipped_sum(limit)
        assert torch.cat([g.flatten() for g in clipped.values()]).norm() <= limit * (1 + 1e-6)
