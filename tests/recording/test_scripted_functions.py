"""Functions under ``torch.jit.script``: followed in a recording, themselves everywhere else."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error


def scripted(function: Callable[..., Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(function)


def scale(x: Tensor, factor: float = 0.5) -> Tensor:
    return torch.tanh(x * factor)


def centre(x: Tensor) -> Tensor:
    return x - x.mean(0)


def halved(x: Tensor, factor: float) -> Tensor:
    return x * (torch.ones(x.shape[1], dtype=torch.long) * factor)


def says_where(x: Tensor) -> Tensor:
    if torch.jit.is_scripting():
        return x + 1
    return x + 1


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 3), nn.Linear(3, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


SCALE, HALVED = scripted(scale), scripted(halved)


@pytest.mark.parametrize(
    "function",
    [
        SCALE, lambda x: SCALE(x, 2), lambda x: SCALE(x, factor=2), scripted(says_where),
        lambda x: HALVED(x, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lean", [False, True])
def test_followed(function: Any, lean: bool) -> None:
    model, x = Model(function).double(), torch.randn(4, 4).double()
    expected = oracle(model, loss, x)
    for _ in range(3):  # TorchScript specialises in the second run
        with persample.record(model, lean=lean) as tape:
            tape.backward(loss(model, x))
        norms = torch.cat([g.flatten(1) for g in expected.values()], 1).norm(dim=1)
        torch.testing.assert_close(tape.norms(), norms)
    if not lean:
        assert relative_error(tape.grads(), expected) < 1e-10


def test_samples_that_interact_are_refused() -> None:
    model = Model(scripted(centre))
    with persample.record(model) as tape, pytest.raises(persample.PersampleError) as caught:
        tape.backward(loss(model, torch.randn(4, 4)))
    assert "mean" in str(caught.value) or "sum over samples" in str(caught.value)


def test_itself_after_the_block_and_in_other_threads() -> None:
    seen: list[Any] = []

    def note(x: Tensor) -> Tensor:
        seen.append(threading.get_ident())
        return SCALE(x)

    model, before = Model(note), torch._C.ScriptFunction.__dict__["__call__"]
    with pytest.raises(ZeroDivisionError), persample.record(model):
        assert torch._C.ScriptFunction.__dict__["__call__"] is not before
        worker = threading.Thread(target=lambda: seen.append(SCALE(torch.ones(2))))
        worker.start()
        worker.join()
        with persample.record(nn.Linear(2, 2)):
            pass
        assert torch._C.ScriptFunction.__dict__["__call__"] is not before
        1 / 0  # noqa: B018
    assert torch._C.ScriptFunction.__dict__["__call__"] is before
    torch.testing.assert_close(seen[0], scale(torch.ones(2)))
