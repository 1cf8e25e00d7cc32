"""What a plain step holds at its highest point, estimated while a recorded one runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample
from persample.backward import plain_step
from persample.command_line.memory import Meter

N, T, D = 4, 64, 128
Losses = Callable[[nn.Module], Tensor]


class Block(nn.Module):
    """Attention and a wide layer, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Tokens(nn.Module):
    """Blocks between a table and a large head."""

    def __init__(self, words: int, depth: int, *, again: bool | None = None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, D), nn.Linear(D, words)
        self.blocks, self.again = nn.ModuleList(Block() for _ in range(depth)), again

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            again = self.again
            x = block(x) if again is None else checkpoint(block, x, use_reentrant=again)
        return self.head(x)


def tokens(model: nn.Module) -> Tensor:
    ids = torch.arange(N * T).view(N, T) % 50
    return F.cross_entropy(model(ids).mT, ids, reduction="none").mean(1)


def images(model: nn.Module) -> Tensor:
    return model(torch.ones(16, 3, 32, 32)).square().mean(1)


def vectors(model: nn.Module) -> Tensor:
    return model(torch.ones(N, T, D)).square().sum((1, 2))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3),
        nn.ReLU(), nn.Flatten(), nn.Linear(32 * 14 * 14, 10),
    )  # fmt: skip


# how much of the truth is seen, at least
CASES: dict[str, tuple[Callable[[], nn.Module], Losses, float]] = {
    "head": (lambda: Tokens(5000, 2), tokens, 0.95),
    "blocks": (lambda: Tokens(100, 6), tokens, 0.95),
    "convolutions": (convolutions, images, 0.8),
    "linear": (lambda: nn.Sequential(*[nn.Linear(D, D) for _ in range(8)]), vectors, 0.4),
}


def estimated(model: nn.Module, losses: Losses, **options: Any) -> int:
    with persample.record(model, **options) as tape:
        tape.backward(losses(model))
    return tape._context.backward.plain_bytes


@pytest.mark.parametrize("case", CASES)
def test_about_what_a_plain_step_holds(case: str) -> None:
    build, losses, least = CASES[case]
    model = build()

    with Meter() as meter:
        losses(model).sum().backward()
    found = estimated(model, losses) / meter.peak
    assert least <= found <= 1.05


def test_once_for_a_learned_program(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tokens(100, 2)
    found = estimated(model, tokens)
    made: list[Any] = []
    monkeypatch.setattr(plain_step, "PlainStep", made.append)
    assert estimated(model, tokens) == found > 0
    assert not made


def test_only_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_step, "PlainStep", None)
    assert estimated(Tokens(100, 2), tokens, budget=1 << 20) == 0
    assert estimated(Tokens(100, 2), tokens, lean=True) == 0
    small = nn.Sequential(nn.Linear(3, 4))
    assert estimated(small, lambda model: model(torch.ones(5, 3)).sum(1)) == 0


def test_what_a_hook_keeps_is_not_touched() -> None:
    unpacked: list[Tensor] = []

    def losses(model: nn.Module) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, counted):
            return tokens(model)

    def counted(x: Tensor) -> Tensor:
        unpacked.append(x)
        return x

    model = Tokens(100, 2)
    assert estimated(model, losses, budget=1 << 20) == 0
    count = len(unpacked)
    assert estimated(model, losses) == 0  # not known
    assert len(unpacked) == 2 * count > 0


def test_not_known_where_parts_are_run_again() -> None:
    for reentrant in (True, False):
        model = Tokens(100, 2, again=reentrant)
        assert estimated(model, tokens) == 0
