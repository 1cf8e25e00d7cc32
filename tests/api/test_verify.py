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
    assert report.interacting
    assert "isolation failed" in str(report)


def test_passes_what_keeps_samples_apart() -> None:
    assert persample.verify(nn.Linear(4, 3).double(), each, batch())


def test_takes_several_losses_of_a_sample() -> None:
    def squares(model: nn.Module, data: Batch) -> Tensor:
        return model(data[0]).square()

    assert persample.verify(nn.Linear(4, 3).double(), squares, batch())
    coupled = persample.verify(
        nn.Linear(4, 3).double(), lambda m, d: squares(m, d) * d[1].max(), batch()
    )
    assert coupled.interacting


class Counted(nn.Module):
    """Buffers that every call writes to, replaces, or makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.spectral_norm(nn.Linear(4, 3))
        self.seen, self.calls = nn.Buffer(torch.ones(())), nn.Buffer(torch.ones(()))
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls, self.cache = self.calls + 1, torch.ones(())
        return self.layer(x) * self.seen / self.calls.sqrt()  # type: ignore[no-any-return]


@pytest.mark.parametrize("inspected", [False, True])
def test_buffers_are_the_same_in_every_run_and_afterwards(inspected: bool) -> None:
    model = Counted().double()
    before = [(name, id(b), b.clone()) for name, b in model.named_buffers()]
    if inspected:
        persample.inspect(model, each, [batch()])
    else:
        assert persample.verify(model, each, batch())
    after = list(model.named_buffers())
    assert [(name, id(b)) for name, b in after] == [(name, where) for name, where, _ in before]
    assert all(torch.equal(b, was) for (_, b), (*_, was) in zip(after, before, strict=True))


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


class Unequal(nn.Module):
    """Two branches, one of which has gradients some thousand times smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([1e3 * self.large(x), self.small(x)], 1)


def branches(model: nn.Module, data: Batch) -> Tensor:
    return model(data[0]).square().sum(2).sum(1)


def coupled_branch(model: nn.Module, data: Batch) -> Tensor:
    large, small = model(data[0]).square().sum(2).unbind(1)
    return torch.as_tensor(large + small / (4 + (data[1] > 0).sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_gradients_are_judged_by_their_own_size(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, data = Unequal().to(dtype), (batch()[0].to(dtype), LABELS)
    with torch.no_grad():
        model.large.weight.mul_(1e-3)
        model.large.bias.mul_(1e-3)
    assert persample.verify(model, branches, data)
    report = persample.verify(model, coupled_branch, data)
    wrong = {checked.name for checked in report.parameters if not checked.ok}
    assert wrong == {"small.weight", "small.bias"}


def test_rounding_is_no_disagreement() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.LayerNorm(64, elementwise_affine=False))
    attention = nn.MultiheadAttention(64, 4, batch_first=True)  # the bias of keys has no gradient

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.attention = model, attention

        def forward(self, x: Tensor) -> Tensor:
            h = self.model(x)
            return torch.as_tensor(self.attention(h, h, h)[0])

    x = 10 * torch.randn(6, 12, 4)
    report = persample.verify(Net(), lambda m, x: m(x).square().sum((1, 2)), x)
    assert report, str(report)


def test_data_that_the_step_takes_gradients_by() -> None:
    def slopes(model: nn.Module, data: Batch) -> Tensor:
        x = data[0].requires_grad_()
        return torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)[0].square().sum(1)

    assert persample.verify(nn.Linear(4, 3).double(), slopes, batch())


def test_a_step_that_does_not_run_with_samples_exchanged_is_refused() -> None:
    def ordered(model: nn.Module, data: Batch) -> Tensor:
        if data[1][0] != 1:
            raise ValueError("the first label has to be 1")
        return each(model, data)

    with pytest.raises(persample.UsageError, match="does not run") as caught:
        persample.verify(nn.Linear(4, 3).double(), ordered, batch())
    assert "the first label has to be 1" in caught.value.why
