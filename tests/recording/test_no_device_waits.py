"""Recording never waits for the device: no number is read back from a tensor on the way.

Reading a number (``item``, ``bool``, ``nonzero``, ``equal``) makes the host wait for everything the
device has been given. Counted here below autograd, where every one of them must pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import persample

from .. import gpu
from ..models import MODELS, Fn, flat_loss

READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")
# where the samples do not lie on one axis, rows carry their samples' numbers, which are compared
BY_ROW = set(
    """packed_lstm gru_packed_both_ways experts_index_add experts_of_few_samples picture_tokens
    siamese_concat buffer_written_in_a_loop embedding_bag gru_reused gru_time_first lstm
    lstm_frozen_hidden lstm_projected rnn_learned_state rnn_with_initial_state""".split()
)


class Reads(TorchDispatchMode):
    """Counts what reads a number back."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        on_host = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.uint8
        if name in READS and not on_host:  # states of random generators never leave the host
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def reads(model: nn.Module, batch: tuple[Any, ...], *questions: str) -> list[str]:
    with Reads() as plain:
        flat_loss(model(*batch)).sum().backward()
    with Reads() as counter, persample.record(model) as tape:
        tape.backward(flat_loss(model(*batch)))
        for question in questions:
            getattr(tape, question)()
    return counter.seen[len(plain.seen) :]


@pytest.mark.parametrize("name", sorted(set(MODELS) - BY_ROW))
def test_recording_reads_nothing(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name](3)
    assert reads(model, batch) == []


@pytest.mark.parametrize("name", ["mlp", "convnet", "attention", "transformer_layer"])
def test_norms_read_nothing(name: str) -> None:
    """Nothing per parameter: whether products cancelled anywhere is read once, as a list."""
    torch.manual_seed(0)
    model, batch = MODELS[name](3)
    assert reads(model, batch, "norms") == []


def test_norms_ask_once_whether_anything_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: (asked.append(x.numel()), real(x))[1])
    model = nn.Sequential(*[nn.Linear(400, 400, bias=False) for _ in range(3)])
    with persample.record(model) as tape:
        tape.backward(flat_loss(model(torch.randn(4, 5, 400))))
    asked.clear()
    tape.norms()
    assert asked == [1]
    tape.parameter_norms()
    assert asked == [1, 3]


def test_checkpointing_reads_nothing_per_layer() -> None:
    def deep(s: Any, x: Tensor) -> Tensor:
        for layer in s.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(6)])
    assert len(reads(Fn(deep, layers=layers), (torch.randn(4, 5),))) == 0


def test_the_counter_counts() -> None:
    found: dict[str, Callable[[Tensor], Any]] = {
        "item": lambda t: t.sum().item(),
        "bool": lambda t: bool(t.any()),
        "nonzero": lambda t: t.nonzero(),
        "equal": lambda t: torch.equal(t, t),
    }
    for name, read in found.items():
        with Reads() as counter:
            read(torch.ones(3))
        assert counter.seen, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_the_check_says_that_there_is_no_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 0
    assert "there is no CUDA device" in capsys.readouterr().out
