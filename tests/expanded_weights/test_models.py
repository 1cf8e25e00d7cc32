"""What the drop-in must get right, model by model, against one sample at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import persample
from persample.expanded_weights import call_for_per_sample_grads
from persample.testing import oracle, relative_error

from ..batteries.test_models import NEEDS_SAMPLES, double
from ..models import MODELS, Fn, flat_loss, par
from .expanded_models import HERE, N


def rows(model: nn.Module, n: int) -> dict[str, Tensor]:
    """What is on the parameters; zeros for those that were not reached. Cleared afterwards."""
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            grad = getattr(p, "grad_sample", None)
            found[name] = p.new_zeros((n, *p.shape)).detach() if grad is None else grad
            p.grad_sample = None
    return found


def loss(model: nn.Module, batch: Any) -> Tensor:
    return flat_loss(model(*batch))


def error(model: nn.Module, batch: tuple[Any, ...], n: int, reduction: str = "sum") -> float:
    """Deviation of grad_sample from one sample at a time."""
    expected = oracle(model, loss, batch, n=n)
    options = {"batch_size": n} if n else {}
    call = call_for_per_sample_grads(model, loss_reduction=reduction, **options)
    losses = flat_loss(call(*batch))
    (losses.mean() if reduction == "mean" and n else losses.sum()).backward()
    assert all(p.grad is None for p in model.parameters())
    return relative_error(rows(model, n), expected)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("n", [0, 1, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_that_record_takes(name: str, n: int, reduction: str) -> None:
    if n == 0 and name in NEEDS_SAMPLES:
        pytest.skip("torch refuses the empty batch")
    torch.manual_seed(0)
    model, batch = double(*MODELS[name](n))
    if n == 0 and any(b.dim() == 0 or len(b) for b in batch if isinstance(b, Tensor)):
        pytest.skip("constants among the inputs need batch_size=, which is positive")
    assert error(model, batch, n, reduction) < 1e-10


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", HERE)
def test_right_here(name: str, reduction: str) -> None:
    torch.manual_seed(0)
    model, batch = double(*HERE[name]())
    assert error(model, batch, len(batch[0]), reduction) < 1e-10


def test_group_norm_with_a_bias_alone() -> None:
    # torch 2.13 itself cannot back-propagate this: a weight of ones stands in for none
    torch.manual_seed(0)

    def forward(s: Any, x: Tensor) -> Tensor:
        return F.group_norm(s.layer(x), 2, s.ones if s.known else None, s.b).tanh()

    net = Fn(forward, b=par(4), layer=nn.Linear(3, 3), known=True, ones=torch.ones(4)).double()
    x = torch.randn(N, 4, 3, dtype=torch.float64)
    expected = oracle(net, loss, (x,))
    net.known = False
    flat_loss(call_for_per_sample_grads(net)(x)).sum().backward()
    assert relative_error(rows(net, N), expected) < 1e-10


# ---------------------------------------------------------------- sequences


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_time_first_then_linear_when_t_equals_n(kind: type[nn.RNNBase], hidden: bool) -> None:
    torch.manual_seed(0)
    net = Fn(lambda s, x, *h: s.head(s.rnn(x, *h)[0].tanh()), rnn=kind(5, 4), head=nn.Linear(4, 2))
    net.double()
    states: tuple[Any, ...] = ()
    if hidden:
        one = torch.randn(1, N, 4, dtype=torch.float64)
        states = ((one, one * 2),) if kind is nn.LSTM else (one,)
    batch = (torch.randn(N, N, 5, dtype=torch.float64), *states)

    def time_first(model: nn.Module, batch: Any) -> Tensor:
        return model(*batch).square().mean((0, 2))

    expected = oracle(net, time_first, batch, n=N, dim=1)
    out = call_for_per_sample_grads(net, batch_first=False)(*batch)
    out.square().mean((0, 2)).sum().backward()
    assert relative_error(rows(net, N), expected) < 1e-10


@pytest.mark.parametrize("layers", [1, 2])
def test_initial_states_beside_samples_first(layers: int) -> None:
    torch.manual_seed(0)
    net = Fn(lambda s, x, h: s.rnn(x, h)[0], rnn=nn.GRU(5, 4, layers, batch_first=True)).double()
    x, h = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(layers, 2, 4, dtype=torch.float64)
    h.requires_grad_()
    expected = [
        torch.autograd.grad(
            net(x[i : i + 1], h[:, i : i + 1]).square().sum(), list(net.parameters())
        )
        for i in range(2)
    ]
    call_for_per_sample_grads(net, batch_size=2)(x, h).square().sum().backward()
    for p, each in zip(net.parameters(), zip(*expected, strict=True), strict=True):
        assert torch.allclose(p.grad_sample, torch.stack(each))
    (plain,) = torch.autograd.grad(net(x, h).square().sum(), h)
    assert torch.allclose(h.grad, plain)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_unsorted_packed_rows_are_in_the_callers_order(kind: Any, given: bool) -> None:
    torch.manual_seed(0)
    net = kind(5, 4, bidirectional=True).double()
    sequences = [torch.randn(t, 5, dtype=torch.float64) for t in (2, 5, 1, 3)]
    call = call_for_per_sample_grads(net, batch_size=4 if given else None)
    out, _ = call(pack_sequence(sequences, enforce_sorted=False))
    out.data.square().sum().backward()
    for i, sequence in enumerate(sequences):
        alone = net(sequence.unsqueeze(1))[0].square().sum()
        for p, g in zip(
            net.parameters(), torch.autograd.grad(alone, list(net.parameters())), strict=True
        ):
            assert torch.allclose(p.grad_sample[i], g)


def test_lengths_among_the_inputs() -> None:
    torch.manual_seed(0)

    def forward(s: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        return s.rnn(packed)[1][0][0]

    net = Fn(forward, rnn=nn.LSTM(5, 4, batch_first=True)).double()
    batch = (torch.randn(N, 6, 5, dtype=torch.float64), torch.tensor([3, 6, 1, 4]))
    assert error(net, batch, N) < 1e-10


def test_lstm_in_single_precision() -> None:
    torch.manual_seed(0)
    net, x = nn.LSTM(5, 4, batch_first=True), torch.randn(N, 6, 5)
    assert error(net, (x,), N) < 1e-5


def test_autocast_to_bfloat16() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(N, 7, 5)
    expected = oracle(net, loss, (x,), n=N)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call_for_per_sample_grads(net)(x)
    flat_loss(out.float()).sum().backward()
    found = rows(net, N)
    assert all(g.dtype == torch.float32 for g in found.values())
    assert relative_error(found, expected) < 0.03


# ---------------------------------------------------------------- must be refused


def test_an_input_edited_in_place_raises() -> None:
    net, x = nn.Linear(5, 3), torch.randn(N, 5)
    total = call_for_per_sample_grads(net)(x).sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    assert getattr(net.weight, "grad_sample", None) is None


def test_a_gradient_penalty_is_refused() -> None:
    net, x = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(N, 5)
    x.requires_grad_()
    out = call_for_per_sample_grads(net)(x)
    with pytest.raises(persample.MixedSamplesError, match="gradients of gradients"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    assert all(getattr(p, "grad_sample", None) is None for p in net.parameters())


@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_in_training_is_refused(affine: bool) -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=affine), nn.Linear(6, 2))
    out = call_for_per_sample_grads(net)(torch.randn(N, 5))
    with pytest.raises(persample.MixedSamplesError, match="statistics of the whole batch"):
        out.sum().backward()
    assert all(getattr(p, "grad_sample", None) is None for p in net.parameters())


@pytest.mark.parametrize("together", [False, True])
def test_two_batches_without_clearing_raise(together: bool) -> None:
    net, x = nn.Linear(5, 3), torch.randn(N, 5)
    call = call_for_per_sample_grads(net)
    if together:
        total = call(x).sum() + call(x + 1).sum()
        with pytest.raises(persample.UsageError, match="incorrect for multiple calls"):
            total.backward()
    else:
        call(x).sum().backward()
        with pytest.raises(persample.UsageError, match="incorrect for multiple calls"):
            call(x + 1)


def test_a_second_batch_of_another_size() -> None:
    torch.manual_seed(0)
    net = nn.Linear(5, 3).double()
    call = call_for_per_sample_grads(net)
    for n in (4, 2, 7, 0):
        x = torch.randn(n, 5, dtype=torch.float64)
        flat_loss(call(x)).sum().backward()
        assert net.weight.grad_sample.shape == (n, 3, 5)
        assert relative_error(rows(net, n), oracle(net, loss, (x,), n=n)) < 1e-12
