"""Products of factors are the same whichever way they are computed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.forms import matrix_products
from persample.forms.matrix_products import rows_by_rows, sum_products


def factor(n: int, t: int, length: int, *, by_columns: bool) -> Tensor:
    """Of samples, contiguous along positions or along lengths."""
    if by_columns:
        return torch.randn(n, length, t, dtype=torch.float64).mT
    return torch.randn(n, t, length, dtype=torch.float64)


@pytest.mark.parametrize("t", [1, 63, 64, 200])
@pytest.mark.parametrize("b", [1, 2, 8, 9, 16, 27, 31, 32])
def test_sums_of_products_are_right_in_every_order(t: int, b: int) -> None:
    torch.manual_seed(0)
    for a, one, two in itertools.product((3, 16, 20, 64), (False, True), (False, True)):
        left, right = factor(3, t, a, by_columns=one), factor(3, t, b, by_columns=two)
        expected = torch.einsum("nta,ntb->nab", left, right)
        found = sum_products(left, right)
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous()
        out = torch.full((3, a, b), float("nan"), dtype=torch.float64)
        sum_products(left, right, out)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(sum_products(left[0], right[0]), expected[0])
        blocks = sum_products(left.unsqueeze(1), right.unsqueeze(1))
        torch.testing.assert_close(blocks, expected.unsqueeze(1))


def test_narrow_products_are_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def product(one: Tensor, two: Tensor, out: Tensor | None = None) -> Tensor:
        shapes.append((one.shape[-2], two.shape[-1]))
        return torch.matmul(one, two, out=out)

    monkeypatch.setattr(matrix_products, "_PRODUCTS", {3: product})
    for a, b in ((32, 27), (27, 32), (32, 32)):
        sum_products(torch.randn(2, 100, a), torch.randn(2, 100, b))
    assert shapes == [(27, 32), (27, 32), (32, 32)]


@pytest.mark.parametrize("t", [32, 33, 50, 65, 95, 96, 97, 200])
def test_products_of_stripes_are_those_of_all(monkeypatch: pytest.MonkeyPatch, t: int) -> None:
    monkeypatch.setattr(matrix_products, "_SMALL", 0)
    thinnest: list[int] = []
    bmm = torch.bmm

    def watched(one: Tensor, two: Tensor) -> Tensor:
        thinnest.append(min(one.shape[1], two.shape[2]))
        return bmm(one, two)

    torch.manual_seed(0)
    rows = torch.randn(3, t, 150, dtype=torch.float64)
    monkeypatch.setattr(torch, "bmm", watched)
    found = rows_by_rows(rows, rows)
    assert len(thinnest) > 1
    assert min(thinnest) >= matrix_products.THIN  # thinner products are rounded in another way
    torch.testing.assert_close(found, rows @ rows.mT)


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_inner_products_of_one_parameter_used_in_several_ways(uses: int) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(20, 8).double()
    ids = torch.randint(20, (5, 6))

    def loss(ids: Tensor) -> Tensor:
        h = table(ids)
        for _ in range(uses):
            h = (h @ table.weight.T).tanh() @ table.weight
        return h.square().flatten(1).sum(1)

    with persample.record(table) as tape:
        tape.backward(loss(ids))
    rows = torch.stack(
        [torch.autograd.grad(loss(ids[i : i + 1]).sum(), table.weight)[0] for i in range(5)]
    ).flatten(1)
    torch.testing.assert_close(tape.gram(), (rows @ rows.T).to(tape.gram().dtype))
