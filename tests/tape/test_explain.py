"""What ``tape.explain()`` tells."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import persample

from ..models import Fn, par


def test_uses_aliases_and_parameters_without_gradient() -> None:
    table = nn.Embedding(9, 5)
    head = nn.Linear(5, 9, bias=False)
    head.weight = table.weight
    model = Fn(lambda s, i: s.head(s.table(i).tanh()), table=table, head=head, unused=par(2))
    with persample.record(model) as tape:
        tape.backward(model(torch.randint(9, (3, 4))).square().mean((1, 2)))
    told = tape.explain()
    assert {u.parameter for u in told.uses} == {"table.weight"}
    assert told.uses[0].aliases == ("head.weight",)
    assert {u.operator for u in told.uses} == {"embedding", "linear"}
    assert told.without_gradient == ("unused",)
    assert all(u.work > 0 and u.kept_bytes > 0 and "test_explain" in u.place for u in told.uses)
    assert "head.weight" in str(told)
    assert "no gradient reached" in str(told)


def test_what_is_slow() -> None:
    model = nn.EmbeddingBag(7, 4, mode="max")
    with persample.record(model) as tape:
        tape.backward(model(torch.randint(7, (3, 5))).sum(1))
    assert any("embedding_bag" in line for line in tape.explain().slow)


def test_sizes_that_would_become_ambiguous() -> None:
    def f(s: Fn, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(s.l(x), x, x, attn_mask=mask)

    model = Fn(f, l=nn.Linear(5, 5))
    x, mask = torch.randn(3, 4, 5), torch.zeros(4, 4)
    with persample.record(model) as tape:
        tape.backward(model(x, mask).sum((1, 2)))
    (line,) = tape.explain().ambiguous
    assert "(4, 4)" in line
    assert "a batch of 4" in line
    assert "constants=" in line
    with persample.record(model, constants=(mask,)) as tape:
        tape.backward(model(x, mask).sum((1, 2)))
    assert tape.explain().ambiguous == ()
