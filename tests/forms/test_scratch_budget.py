"""Scratch memory stays within the budget, and the answers do not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import persample

from ..models import Fn
from ..tape.test_queries import close

BUDGET = 32 << 10


class Largest(TorchDispatchMode):
    """The largest tensor that an operator made (views of older memory do not count)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = tree_flatten((args, kwargs or {}))[0]
        old = {t.untyped_storage().data_ptr() for t in given if isinstance(t, Tensor)}
        for t in tree_flatten(out)[0]:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in old:
                if "empty" not in str(func) or t.numel():
                    self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def _long() -> tuple[nn.Module, Tensor]:
    return nn.Linear(400, 300), torch.randn(6, 80, 400)  # neither t × t nor the matrix fits


def _many() -> tuple[nn.Module, Tensor]:
    return nn.Linear(48, 40), torch.randn(6, 500, 48)  # direct


def _wide() -> tuple[nn.Module, Tensor]:
    return nn.Linear(300, 200), torch.randn(6, 400, 300)  # the matrix does not fit


def _conv() -> tuple[nn.Module, Tensor]:
    return nn.Conv2d(8, 32, 3), torch.randn(6, 8, 8, 8)


def _table() -> tuple[nn.Module, Tensor]:
    return nn.Embedding(400, 16), torch.randint(400, (6, 100))


def _tied() -> tuple[nn.Module, Tensor]:
    net = Fn(lambda s, i: F.linear(s.e(i).tanh(), s.e.weight), e=nn.Embedding(60, 16))
    return net, torch.randint(60, (6, 8))


def _twice() -> tuple[nn.Module, Tensor]:
    return _used_twice(40, 15)


def _used_twice(width: int, t: int) -> tuple[nn.Module, Tensor]:
    net = Fn(lambda s, x: s.l(s.l(x).tanh()), l=nn.Linear(width, width))
    return net, torch.randn(6, t, width)


QUESTIONS: dict[str, Callable[[persample.Tape], Any]] = {
    "norms": lambda tape: tape.norms(),
    "weighted_sum": lambda tape: tape.weighted_sum(torch.linspace(-1, 1, 6, dtype=torch.float64)),
    "clipped_sum": lambda tape: tape.clipped_sum(0.1),
    "gram": lambda tape: tape.gram(),
    "dots": lambda tape: tape.dots(
        {name: torch.linspace(0, 1, g.numel(), dtype=torch.float64).view_as(g)
         for name, g in tape._context.parameters.selected.items()}),
    "project": lambda tape: tape.project(8, seed=0),
    "second_moment": lambda tape: tape.second_moment(),
}  # fmt: skip
# What one item of a question takes at least, whatever the budget: a row, or a sample's factors.
LEAST = {
    "_wide": 300 * 200 * 8, "_many": 500 * 48 * 8, "_table": 400 * 16 * 8, "_long": 400 * 300 * 8,
    "_conv": 32 * 36 * 8 * 2, "_tied": 60 * 30 * 8,
}  # fmt: skip


def record(build: Any, budget: int) -> tuple[persample.Tape, int]:
    torch.manual_seed(0)
    model, x = build()
    model, x = model.double(), x.double() if x.is_floating_point() else x
    with persample.record(model, budget=budget) as tape:
        tape.backward(model(x).flatten(1).square().mean(1))
    return tape, sum(p.numel() * 8 for p in model.parameters())


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("build", [_long, _many, _wide, _conv, _table, _tied])
def test_budget(build: Any, question: str) -> None:
    ask = QUESTIONS[question]
    small, size = record(build, BUDGET)
    large, _ = record(build, 1 << 30)
    with Largest() as seen:
        found = ask(small)
    expected = ask(large)
    for a, b in zip(tree_flatten(found)[0], tree_flatten(expected)[0], strict=True):
        close(a, b, 1e-9)
    allowed = BUDGET if question == "norms" else max(BUDGET, LEAST[build.__name__], size)
    assert seen.bytes <= allowed, f"{seen.bytes} bytes at once, {allowed} allowed"


def test_the_budget_is_felt() -> None:
    for build in (_long, _conv):
        small, _ = record(build, BUDGET)
        large, _ = record(build, 1 << 30)
        found = []
        for tape in (small, large):
            with Largest() as seen:
                tape.gram()
                tape.norms()
            found.append(seen.bytes)
        assert found[0] < found[1]


def test_explained() -> None:
    def ways(build: Any, budget: int) -> str:
        return record(build, budget)[0].explain().uses[0].norms

    assert ways(lambda: (nn.Linear(40, 40), torch.randn(6, 8, 40)), 1 << 30) == "rows, joined"
    assert ways(lambda: (nn.Linear(400, 400), torch.randn(6, 8, 400)), 1 << 30) == "gram"
    assert ways(_many, 1 << 30) == "stored rows, joined"  # smaller than its factors
    assert ways(_twice, 1 << 30) == "rows, joined"
    assert ways(lambda: _used_twice(160, 60), 1 << 30) == "direct"
    assert ways(lambda: (nn.Linear(40, 40), torch.randn(6, 1, 40)), 1 << 30) == "rows, joined"
    assert ways(lambda: (nn.Linear(400, 400), torch.randn(6, 1, 400)), 1 << 30) == "one position"
    assert ways(lambda: (nn.Linear(40, 40), torch.randn(6, 8, 40)), 2048) == "gram, 3 tiles"
    alike = [nn.Linear(90, 90, bias=False) for _ in range(3)]
    assert ways(lambda: (nn.Sequential(*alike), torch.randn(6, 90)), 1 << 30) == (
        "one position, joined"
    )
    assert "segments" in ways(_table, 1 << 30)
    assert ways(_tied, 1 << 30) == "gram + segments"
    text = str(record(_tied, 1 << 30)[0].explain())
    assert "norms by" in text
    assert "gram + segments" in text


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "1GB"])
def test_bad_budget(budget: Any) -> None:
    with pytest.raises(persample.UsageError, match="budget"):
        persample.record(nn.Linear(2, 2), budget=budget)
