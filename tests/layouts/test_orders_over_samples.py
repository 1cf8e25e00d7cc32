"""Equal values in a sort over all rows: which of them a sample keeps is its own affair."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import persample


class LargestRow(nn.Module):
    """A weighed sum of the row with the largest score of each graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score, self.weight = nn.Parameter(torch.zeros(3)), nn.Linear(3, 1)

    def forward(self, x: Tensor, owner: Tensor) -> Tensor:
        scores = x.detach()[:, 0]
        order = scores.argsort(descending=True)
        _, back = torch.sort(owner[order], stable=True)
        first = torch.cat([torch.ones(1, dtype=torch.bool), owner.diff() > 0])
        return self.weight(x[order[back[first]]] + self.score)


def _gradients(rows: list[Tensor]) -> Tensor:
    owner = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(r) for r in rows]))
    model, x = LargestRow(), torch.cat(rows)
    with persample.record(model, n=len(rows), sample_ids=owner, constants=("owner",)) as tape:
        tape.backward(model(x, owner).square().sum(1))
    return tape.grads()["weight.weight"]


def test_equal_values_of_a_sample_are_in_its_own_order() -> None:
    torch.manual_seed(0)
    tied = torch.cat([torch.ones(20, 1), torch.randn(20, 2)], 1)
    rows = [torch.cat([torch.randn(9, 1).round(), torch.randn(9, 2)], 1) for _ in range(4)]
    expected = _gradients([tied, rows[0]])[0]
    for others in range(1, 5):
        torch.testing.assert_close(_gradients([*rows[:others], tied])[-1], expected)
        torch.testing.assert_close(_gradients([tied, *rows[-others:]])[0], expected)
