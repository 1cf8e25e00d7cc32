"""Every tiny model, for several batch sizes, against one sample at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error

from ..models import MODELS, Fn, flat_loss, par

# What torch itself does not accept with an empty batch.
NEEDS_SAMPLES = set(
    """packed_lstm gru_time_first lstm conv_reflect attention transformer_layer fused_qkv
    embedding_bag instancenorm time_first_flattened flattened_tokens gru_packed_both_ways
    rnn_with_initial_state
    rnn_learned_state lstm_projected lstm_frozen_hidden gru_reused""".split()
)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return flat_loss(model(*batch))


def double(model: nn.Module, batch: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
    if not any(p.is_complex() for p in model.parameters()):
        model = model.double()
    return model, tuple(
        b.double() if isinstance(b, Tensor) and b.is_floating_point() else b for b in batch
    )


@pytest.mark.parametrize("n", [0, 1, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_rows_equal_one_sample_at_a_time(name: str, n: int) -> None:
    if n == 0 and name in NEEDS_SAMPLES:
        pytest.skip("torch refuses the empty batch")
    torch.manual_seed(0)
    model, batch = double(*MODELS[name](n))
    expected = oracle(model, loss, batch, n=n)
    with persample.record(model, n=n) as tape:
        tape.backward(loss(model, batch))
    found = tape.grads()
    assert relative_error(found, expected) < 1e-10
    for grad, parameter in zip(found.values(), _trainable(model), strict=True):
        assert grad.is_contiguous()
        assert grad.dtype == parameter.dtype
        assert not grad.requires_grad
    assert all(p.grad is None for p in model.parameters())


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", MODELS)
def test_loop_gives_the_same(name: str) -> None:
    if name == "checkpointed_reentrant":
        pytest.skip("torch refuses torch.autograd.grad through reentrant checkpointing")
    torch.manual_seed(0)
    model, batch = double(*MODELS[name](3))
    with persample.record(model, unproven="loop") as tape:
        tape.backward(loss(model, batch))
    assert relative_error(tape.grads(), oracle(model, loss, batch, n=3)) < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_the_check_finds_nothing_wrong(name: str) -> None:
    if name == "checkpointed_reentrant":
        pytest.skip("torch refuses torch.autograd.grad through reentrant checkpointing")
    torch.manual_seed(0)
    model, batch = double(*MODELS[name](3))
    with persample.record(model, verify=True) as tape:
        tape.backward(loss(model, batch))
    tape.grads()


@pytest.mark.parametrize("n", [0, 1, 3, 4])
def test_layers_of_width_zero(n: int) -> None:
    """What adaptive softmax makes of small layers, for rows of some samples alone."""

    def forward(s: Any, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        return s.c(x).index_put((chosen,), F.linear(F.linear(x[chosen], s.a), s.b))

    torch.manual_seed(0)
    model = Fn(forward, a=par(0, 5), b=par(3, 0), c=nn.Linear(5, 3)).double()
    batch = (torch.randn(n, 5, dtype=torch.float64),)
    expected = oracle(model, loss, batch, n=n)
    with persample.record(model, n=n) as tape:
        tape.backward(loss(model, batch))
    assert relative_error(tape.grads(), expected) < 1e-10
    sizes = torch.cat([g.flatten(1) for g in expected.values()], 1).norm(dim=1)
    torch.testing.assert_close(tape.norms(), sizes)
