"""Kernels that are tried on the processor at hand: equal numbers, one trial, none if forbidden."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import persample
from persample.forms import kernels
from persample.forms.kernels import BROADCAST, MATRIX, outer_kernel, outer_products


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LARGE", 64)
    monkeypatch.setattr(kernels, "_chosen", {})


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every trial that took place; the matrix product wins."""
    seen: list[Any] = []

    def tried(*given: Any) -> str:
        seen.append(given)
        return MATRIX

    monkeypatch.setattr(kernels, "_tried", tried)
    return seen


def factors(n: int = 5, a: int = 7, b: int = 6, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    wild = 10.0 ** torch.randint(-18, 18, (n, a, 1))
    return (torch.randn(n, a, 1) * wild).to(dtype), torch.randn(n, 1, b).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("into", [False, True])
def test_both_kernels_round_alike(monkeypatch: Any, dtype: Any, n: int, into: bool) -> None:
    column, row = factors(n, 33, 29, dtype)
    column[:, :2], row[..., 1:3] = 0.0, -0.0
    if n:
        column[0, 3], column[-1, 4] = torch.inf, torch.nan
    found = []
    for name in (BROADCAST, MATRIX):
        monkeypatch.setattr(kernels, "_tried", lambda *_, name=name: name)
        monkeypatch.setattr(kernels, "_chosen", {})
        out = torch.empty(n, 33, 29, dtype=dtype) if into else None
        found.append(outer_products(column, row, out))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)


def test_a_class_is_tried_once(trials: list[Any]) -> None:
    for _ in range(3):
        assert outer_kernel(*factors()) == MATRIX
    assert len(trials) == 1
    outer_kernel(*factors(dtype=torch.float64))
    assert len(trials) == 2
    assert outer_kernel(*factors(1, 4, 4)) == BROADCAST  # too small to matter
    assert len(trials) == 2


def test_the_trial_itself_chooses_a_kernel() -> None:
    assert outer_kernel(*factors()) in (BROADCAST, MATRIX)


def test_no_trial_where_numbers_could_differ_or_choices_must_not(trials: list[Any]) -> None:
    column, row = factors()
    assert outer_kernel(column[:, None], row[:, None]) == BROADCAST
    assert outer_kernel(column.bfloat16(), row.bfloat16()) == BROADCAST
    torch.use_deterministic_algorithms(True)
    try:
        assert outer_kernel(column, row) == BROADCAST
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("high")
    try:
        assert outer_kernel(column, row) == BROADCAST
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not trials


def test_threads_may_ask_at_once() -> None:
    column, row = factors()
    found: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: found.append(outer_products(column, row))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(each, column * row) for each in found)


@pytest.mark.parametrize("name", [BROADCAST, MATRIX])
def test_explain_shows_the_kernel_and_gradients_are_right(monkeypatch: Any, name: str) -> None:
    monkeypatch.setattr(kernels, "_tried", lambda *_: name)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(64, 9)).double()
    x = torch.randn(4, 8, 4, 4, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(model(x).square().sum(1))
    rows = {use.parameter: use.rows for use in tape.explain().uses}
    assert rows["2.weight"] == name
    assert rows["0.weight"] in ("patches", "grouped convolution")
    assert name in str(tape.explain())
    grads = tape.grads()
    for i in range(4):
        alone = torch.autograd.grad(model(x[i : i + 1]).square().sum(), list(model.parameters()))
        for (key, _), wanted in zip(model.named_parameters(), alone, strict=True):
            torch.testing.assert_close(grads[key][i], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_zeros_are_zeros(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Also in memory that held something else, and where the system clears it."""
    monkeypatch.setattr(kernels, "_CLEARED", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for shape in ((3, 50, 7), (0, 4), (2, 1), ()):
        used = torch.full(shape, 3.0, dtype=dtype)
        del used
        found = kernels.zeros(shape, dtype, torch.device("cpu"))
        assert found.shape == shape
        assert found.dtype == dtype
        assert not found.any()
    assert kernels.zeros((8, 8), dtype, torch.device("meta")).is_meta
