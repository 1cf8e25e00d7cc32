"""einsum takes its factors one by one, in a tuple, in a list, or with numbers for letters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error


class Products(nn.Module):
    """The same letters in every way of writing them; tuples call einsum once more inside."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5, 3))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """One loss per sample."""
        scores = torch.einsum("btd,bsd->bts", (self.layer(x), x))
        mixed = torch.einsum("btd,de->bte", (torch.einsum("bts,bsd->btd", scores, x), self.w))
        weighed = torch.einsum("bte,ef,bt->btf", [mixed, self.v, x.sum(-1)])
        return weighed.square().sum((1, 2))


class Numbered(nn.Module):
    """Numbers for letters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        """One loss per sample."""
        found: Tensor = torch.einsum(x, [0, 1, 2], self.w, [2, 3], [0, 1, 3])
        return found.square().sum((1, 2))


def test_every_form_is_exact() -> None:
    for model in (Products().double(), Numbered().double()):
        for n in (3, 1, 3):
            x = torch.randn(n, 3, 4, dtype=torch.float64)
            with persample.record(model) as tape:
                tape.backward(model(x))
            expected = oracle(model, lambda m, batch: m(batch), x)
            assert relative_error(tape.grads(), expected) < 1e-12
