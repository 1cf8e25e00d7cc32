"""``persample.verify`` finds what the recorder takes for constants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample

Batch = tuple[Tensor, Tensor]
LABELS = torch.tensor([1, 2, 0, 0, 1, 2])  # neighbours of the first and last do not change counts


def batch() -> Batch:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, LABELS


def each(model: nn.Module, data: Batch) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1], reduction="none")


COUPLED: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    "count of labels": lambda m, d: each(m, d) / (d[1] > 0).sum(),
    "largest label": lambda m, d: each(m, d) * d[1].max(),
    "mean input": lambda m, d: each(m, (d[0] - d[0].mean(0), d[1])),
    "classes by frequency": lambda m, d: each(m, d) / torch.bincount(d[1], minlength=3)[d[1]],
}


@pytest.mark.parametrize("name", COUPLED)
def test_finds_losses_that_look_at_the_batch(name: str) -> None:
    report = persample.verify(nn.Linear(4, 3).double(), COUPLED[name], batch())
    assert not report
    assert "FAILED" in str(report)


def test_passes_what_keeps_samples_apart() -> None:
    assert persample.verify(nn.Linear(4, 3).double(), each, batch())


def test_skips_batches_of_copies_that_the_model_does_not_take() -> None:
    def sorted_only(model: nn.Module, data: Batch) -> Tensor:
        if data[1].unique().numel() < 3:
            raise ValueError("every class must be there")
        return each(model, data)

    assert persample.verify(nn.Linear(4, 3).double(), sorted_only, batch())


def test_needs_losses() -> None:
    with pytest.raises(persample.UsageError, match="one loss per sample") as caught:
        persample.verify(nn.Linear(4, 3).double(), lambda m, d: each(m, d).mean(), batch())
    assert "none" in caught.value.fix


@pytest.mark.parametrize("seed", range(3))
def test_half_precision_is_no_disagreement(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 10))
    data = torch.randn(64, 32), torch.randint(0, 10, (64,))

    def cast(model: nn.Module, data: Batch) -> Tensor:
        with torch.autocast(data[0].device.type, torch.bfloat16):
            return each(model, data)

    assert persample.verify(model, cast, data)
    with persample.record(model, verify=True) as tape:
        tape.backward(cast(model, data))
    assert persample.verify(model.bfloat16(), each, (data[0].bfloat16(), data[1]))


@pytest.mark.parametrize("name", COUPLED)
def test_half_precision_hides_no_coupling(name: str) -> None:
    x, labels = batch()
    torch.manual_seed(0)
    assert not persample.verify(nn.Linear(4, 3).bfloat16(), COUPLED[name], (x.bfloat16(), labels))


def test_what_cannot_be_verified() -> None:
    model = nn.Linear(4, 3).double()
    with pytest.raises(persample.UsageError, match="loss_fn is a function"):
        persample.verify(model, 3, batch())  # type: ignore[arg-type]
    with pytest.raises(persample.UsageError, match="no tensor with samples"):
        persample.verify(model, each, None)
    with pytest.raises(persample.UsageError, match="takes a tensor of losses"):
        persample.verify(model, lambda m, d: [*each(m, d)], batch())  # type: ignore[arg-type, return-value]
