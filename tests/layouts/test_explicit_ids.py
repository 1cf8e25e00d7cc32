"""Samples that ids tell apart: rows in no order, unequal counts, rows of nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample

from .. import graphs, irregular, operators

ENTRIES = operators.entries()[3 :: 2 * 6]


class Table(nn.Module):
    """A table of tokens and a scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def tokens(self, index: Tensor) -> Tensor:
        """One number for each token."""
        return (self.table(index) * self.scale).square().sum(-1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", ENTRIES, ids=lambda op: f"{op.name}.{op.variant_test_name}")
def test_operators(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "SAMPLES_PER_ENTRY", 2)
    assert operators.attack(op, irregular.trials)["wrong"] == 0


@pytest.mark.filterwarnings("ignore")
def test_graphs() -> None:
    verdicts = [graphs.trial(seed, told=True) for seed in range(100)]
    assert not [v for v in verdicts if v.startswith("wrong")]
    assert "exact" in verdicts


def _rows(module: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    named = dict(module.named_parameters())
    each = [torch.autograd.grad(loss, [*named.values()], retain_graph=True) for loss in losses]
    return {
        name: torch.stack(rows) for name, rows in zip(named, zip(*each, strict=True), strict=True)
    }


TOKENS = torch.tensor([[1, 2], [3, 4], [5, 6], [0, 1]])


def _begun(module: Table) -> Tensor:
    """A token of nobody before each sample's own, one sample at a time."""
    begin = torch.tensor([2])
    return torch.stack([module.tokens(torch.cat([begin, row])) for row in TOKENS]).sum(1)


def test_constant_tokens_are_not_taken_for_samples() -> None:
    module = Table()
    expected = _rows(module, _begun(module))
    with persample.record(module, n=4, verify=False) as tape:
        tape.mark(TOKENS)
        tape.backward(_begun(module))
    for name, rows in tape.grads().items():
        torch.testing.assert_close(rows, expected[name])


def test_constant_tokens_in_a_sum_of_losses_are_refused() -> None:
    module = Table()
    with persample.record(module, n=4, verify=False) as tape:
        tape.mark(TOKENS)
        total = torch.zeros((), dtype=torch.float64)
        for row in TOKENS:
            total = total + module.tokens(torch.cat([torch.tensor([2]), row])).sum()
        with pytest.raises(persample.MissedUseError, match="rows of no sample"):
            tape.backward(total)


X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
COUNTS = torch.tensor([2, 1, 4, 3])  # as many rows in all as if they were 1, 2, 3, 4
PLACES = torch.tensor([2, 0, 3, 4, 8, 6, 11, 9])  # two elements of each row of X


def _lengthened(module: Table) -> Tensor:
    rows = torch.repeat_interleave(X, COUNTS, dim=0) * module.scale
    index = torch.arange(4).repeat_interleave(COUNTS)
    return torch.zeros(4, dtype=X.dtype).index_add(0, index, rows.square().sum(1))


def _taken(module: Table) -> Tensor:
    found = torch.take_along_dim(X * module.scale, PLACES)
    return found.square().view(4, 2).sum(1)


def _turned(module: Table, tokens: Tensor) -> Tensor:
    rows = module.table(torch.flip(input=tokens, dims=[0])) * module.scale
    return rows.square().sum(1)


def _by_themselves(module: Table) -> Tensor:
    counts = torch.repeat_interleave(COUNTS, COUNTS)
    found = counts * module.scale.sum()
    index = torch.arange(4).repeat_interleave(COUNTS)
    return torch.zeros(4, dtype=X.dtype).index_add(0, index, found.square())


@pytest.mark.parametrize(
    ("losses", "numbers", "ids"),
    [
        pytest.param(_lengthened, COUNTS, None, id="repeat_interleave"),
        pytest.param(_taken, PLACES, torch.arange(8) // 2, id="take_along_dim"),
        pytest.param(_by_themselves, COUNTS, None, id="numbers that say how often they are read"),
    ],
)
def test_numbers_that_are_samples_own(
    losses: Callable[[Table], Tensor], numbers: Tensor, ids: Tensor | None
) -> None:
    module = Table()
    module.table.requires_grad_(False)
    expected = torch.stack(
        [torch.autograd.grad(v, module.scale, retain_graph=True)[0] for v in losses(module)]
    )
    with persample.record(module, n=4, verify=False) as tape:
        tape.mark(X)
        tape.mark(numbers, ids=ids)
        tape.backward(losses(module))
    torch.testing.assert_close(tape.grads()["scale"], expected)


def test_numbers_that_are_given_by_name_are_moved_like_others() -> None:
    module, tokens = Table(), torch.tensor([2, 4, 1, 3])
    with persample.record(module, n=4, verify=False) as tape:
        tape.mark(tokens)
        tape.backward(_turned(module, tokens).mean())
    expected = _rows(module, _turned(module, tokens).flip(0) / 4)
    torch.testing.assert_close(tape.grads()["scale"], expected["scale"])


@pytest.mark.parametrize(
    "ids", [[0, 1, -1, 3], [1, 0, -1, 3], [0, -1, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 2, 2, 3, -1]]
)
def test_a_row_of_nobody_is_not_given_to_a_sample_in_a_sum(ids: list[int]) -> None:
    module = Table()
    rows = torch.randn(len(ids), 3, dtype=torch.float64)
    with persample.record(module, n=4, verify=False) as tape:
        tape.mark(rows, ids=torch.tensor(ids))
        total = (rows * module.scale).sum()
        with pytest.raises(persample.MissedUseError, match="rows of no sample"):
            tape.backward(total)
