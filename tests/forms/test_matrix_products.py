"""Products of factors are the same whichever way they are computed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.forms import kernels, matrix_products, rounding
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


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every product of float32 matrices is oneDNN's; their shapes."""
    shapes: list[tuple[int, ...]] = []

    def counted(one: Tensor, two: Tensor) -> Tensor:
        shapes.append((*one.shape, two.shape[0]))
        return kernels.by_onednn(one, two)

    monkeypatch.setattr(matrix_products, "_WORTH", 1)
    monkeypatch.setattr(matrix_products, "_WIDE", 1)
    monkeypatch.setattr(matrix_products, "by_onednn", counted)
    monkeypatch.setattr(kernels, "_chosen", {})
    monkeypatch.setattr(kernels, "_tried_products", lambda: kernels.ONEDNN)
    monkeypatch.setattr(kernels, "_sizes", set())
    return shapes


def error_in_units(found: Tensor, exact: Tensor) -> float:
    """The largest error of positive sums, in roundings of themselves."""
    return float(((found.double() - exact) / exact).abs().max() / torch.finfo(found.dtype).eps)


@pytest.mark.parametrize("t", [1, 40, 300, 1500, 5000, 40000])
@pytest.mark.parametrize("sides", [(1, 3), (16, 16), (33, 70)])
@pytest.mark.parametrize("by_columns", [False, True])
def test_products_by_onednn_are_rounded_as_bounds_say(
    onednn: list[tuple[int, ...]], t: int, sides: tuple[int, int], by_columns: bool
) -> None:
    """Equal terms are rounded alike: nothing goes further astray."""
    a, b = sides
    for seed in range(4):
        torch.manual_seed(seed)
        one, two = torch.rand(2).add(0.5).tolist()
        left, right = torch.full((2, t, a), one), torch.full((2, t, b), two)
        if by_columns:
            left, right = left.mT.contiguous().mT, right.mT.contiguous().mT
        exact = t * float(left[0, 0, 0].double() * right[0, 0, 0].double())
        limit = rounding.error_units(t, rounding.run_of(t, a, b))
        assert error_in_units(sum_products(left, right), torch.tensor(exact)) < limit
        assert error_in_units(sum_products(left[0], right[0]), torch.tensor(exact)) < limit
        rows = rows_by_rows(left.mT.contiguous(), right.mT.contiguous())
        assert error_in_units(rows, torch.tensor(exact)) < limit
    assert len(onednn) == 4 * (4 + t // matrix_products._TERMS_AT_ONCE)


def test_products_by_onednn_are_right(onednn: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    for one, two in itertools.product((False, True), repeat=2):
        left, right = (factor(3, 50, k, by_columns=c).float() for k, c in ((20, one), (33, two)))
        expected = torch.einsum("nta,ntb->nab", left.double(), right.double()).float()
        torch.testing.assert_close(sum_products(left, right), expected)
        torch.testing.assert_close(sum_products(right, left), expected.mT)
        torch.testing.assert_close(sum_products(left[0], right[0]), expected[0])
        torch.testing.assert_close(sum_products(right[0], left[0]), expected[0].mT)
        out = torch.empty(3, 20, 33)
        assert sum_products(left, right, out) is out
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(rows_by_rows(left, left), left @ left.mT)
    assert onednn


def test_what_onednn_does_not_serve(
    onednn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = torch.randn(3, 50, 20)
    expected = left.mT @ left
    gaps = torch.randn(3, 50, 40)[..., ::2].copy_(left)
    spread = torch.randn(1, 1, 20).expand(3, 50, 20)
    for other in (gaps, spread):
        torch.testing.assert_close(sum_products(other, other), other.mT @ other)
    sum_products(left.double(), left.double())
    sum_products(left.bfloat16(), left.bfloat16())
    sum_products(nn.Parameter(left).detach().as_subclass(Subclass), left)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    torch.testing.assert_close(sum_products(left, left), expected)
    monkeypatch.undo()
    assert not onednn


def test_onednn_serves_so_many_sizes(
    onednn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps code for each: sequences of many lengths would fill the memory."""
    monkeypatch.setattr(kernels, "_SIZES", 3)
    for t in (5, 6, 7, 8, 9, 5):
        left = torch.randn(2, t, 20)
        torch.testing.assert_close(sum_products(left, left), left.mT @ left)
    assert {shape[1] for shape in onednn} == {5, 6, 7}
    assert len(onednn) == 2 * 4


def test_sums_of_every_batch_size_are_of_one_size(onednn: list[tuple[int, ...]]) -> None:
    for count in (511, 512, 700, 1024, 1100):
        left, right = torch.randn(count, 20).double(), torch.randn(count, 30).double()
        found = sum_products(left.float(), right.float())
        torch.testing.assert_close(found.double(), left.T @ right, rtol=1e-4, atol=1e-4)
    assert set(onednn) == {(20, 512, 30)}
    assert len(onednn) == 1 + 1 + 2 + 2


class Subclass(Tensor):
    """Any subclass: its kernels are its own."""


@pytest.mark.parametrize("switch", ["mkldnn", "precision", "backends"])
def test_the_caller_may_rule_out_onednn(onednn: list[tuple[int, ...]], switch: str) -> None:
    left = torch.randn(3, 50, 20)
    if switch == "mkldnn":
        torch._C._set_mkldnn_enabled(False)  # flags() warns of hardware that is not there
        try:
            sum_products(left, left)
        finally:
            torch._C._set_mkldnn_enabled(True)
    elif switch == "backends":
        matmul = torch.backends.mkldnn.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
        try:
            sum_products(left, left)
        finally:
            matmul.fp32_precision = before
    else:
        torch.set_float32_matmul_precision("high")
        try:
            sum_products(left, left)
        finally:
            torch.set_float32_matmul_precision("highest")
    assert not onednn
    sum_products(left, left)
    assert onednn


@pytest.mark.parametrize("name", [kernels.MATRIX, kernels.ONEDNN])
def test_explain_shows_the_library(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(kernels, "_chosen", {})
    monkeypatch.setattr(kernels, "_tried_products", lambda: name)
    model, x = nn.Linear(400, 300), torch.randn(2, 100, 400)
    with persample.record(model) as tape:
        tape.backward(model(x).square().sum((1, 2)))
    assert [use.rows for use in tape.explain().uses if use.parameter == "weight"] == [name]
    rows = torch.stack(
        [torch.autograd.grad(model(x[i]).square().sum(), model.weight)[0] for i in (0, 1)]
    )
    torch.testing.assert_close(tape.grads()["weight"], rows, rtol=1e-4, atol=1e-3)
    total = tape.weighted_sum(torch.ones(2))["weight"]
    torch.testing.assert_close(total, rows.sum(0), rtol=1e-4, atol=1e-3)


def test_a_library_that_is_missing_or_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(one: Tensor, two: Tensor) -> Tensor:
        raise AttributeError("no such operator")

    for kernel in (missing, lambda one, two: one @ two.T + 1):
        monkeypatch.setattr(kernels, "by_onednn", kernel)
        assert kernels._tried_products() == kernels.MATRIX


def test_the_trial_asks_for_far_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is a little faster in this process may be a little slower in the next."""
    for factor_, expected in ((0.8, kernels.MATRIX), (0.5, kernels.ONEDNN)):
        ticks = iter([x for _ in range(5) for x in (0.0, 1.0, 0.0, factor_)])
        monkeypatch.setattr(kernels.time, "process_time", lambda ticks=ticks: next(ticks))
        monkeypatch.setattr(kernels.time, "perf_counter", kernels.time.process_time)
        assert kernels._tried_products() == expected


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
