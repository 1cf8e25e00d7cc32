"""Numbers that forward code takes out of tensors: noted, listed, and named where a bound rests on
them.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import persample

N = 6


class Between(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.second = nn.Linear(4, 8), function, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


class Scale(torch.autograd.Function):
    """Takes a number in forward, and scales in backward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.scale = h.norm().item()
        return h / ctx.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / ctx.scale


def recorded(model: nn.Module, *args: Any, **options: Any) -> persample.Tape:
    with persample.record(model, **options) as tape:
        losses = model(*args).flatten(1).square().sum(1)
        print(f"loss {losses.mean().item():.3f}")
        tape.backward(losses)
    return tape


def warned(tape: persample.Tape) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tape.clipped_sum(1.0)
    return [str(w.message) for w in found if w.category is persample.ExtractedNumberWarning]


TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "item of a norm": lambda h: h / h.norm().item(),
    "float of a maximum": lambda h: h / float(h.detach().abs().max()),
    "a mean, without gradient": lambda h: h * h.detach().mean().item(),
    "a list": lambda h: h * sum(h.mean(0).tolist()),
    "an array": lambda h: h * torch.from_numpy(h.detach().numpy().mean(0)),
    "a count": lambda h: h / (h > 0).sum().item(),
    "a whole count": lambda h: h / int((h > 0).sum()),
    "a branch on a maximum": lambda h: 2 * h if h.abs().max() > 1e6 else h,
    "a branch on a mean": lambda h: 2 * h if h.mean() > 1e6 else h,
    "the truth of a sum": lambda h: h if h.sum() else 2 * h,
    "a copy": lambda h: h * copy.deepcopy(h.detach()).mean(0),
    "in a custom function": Scale.apply,
    "torch.func.grad": lambda h: h * grad(lambda t: t.square().sum())(h.detach()).mean(0),
    "torch.func.jvp": lambda h: h * jvp(torch.square, (h.detach(),), (h.detach(),))[1].mean(),
    "torch.func.jacrev": lambda h: h * jacrev(lambda t: t.square().sum(0))(h.detach()).mean(),
    "a closure in torch.func": lambda h: h * grad(lambda t: (t * h.detach()).sum())(torch.ones(8)),
}
QUIET: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda h: h,
    "each sample's own derivative": lambda h: (
        h * torch.stack([grad(lambda t: t.square().sum())(r) for r in h.detach()])
    ),
    "a derivative of constants": lambda h: h * grad(lambda t: t.square().sum())(torch.ones(8)),
    "each sample's own number": lambda h: torch.stack([r / r.norm().item() for r in h]),
    "a text": lambda h: (str(h.mean()), f"{h.max():.2f}", repr(h), h)[-1],
    "a check for NaN": lambda h: h if not h.isnan().any() else h * 0,
    "a check of all values": lambda h: h if (h < 1e9).all() else h * 0,
    "a size": lambda h: h[:, : int(h.abs().max()) + 100],
    "whether any": lambda h: h if (h > 0).sum() > 0 else 2 * h,
    "the number of a class": lambda h: h[:, : max(8, h.argmax(1).max().item())],
    "a statistic of a parameter": lambda h: h * math.exp(-nn.Parameter(torch.ones(3)).sum().item()),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch.func.jvp
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", TAKEN)
def test_a_value_before_the_losses(name: str, lean: bool) -> None:
    tape = recorded(Between(TAKEN[name]), torch.randn(N, 4), lean=lean)
    (message,) = warned(tape)
    place = "copy.py" if name == "a copy" else "test_extracted_numbers.py"
    assert place in message
    assert "fix: " in message
    listed = tape.explain().numbers
    assert len([line for line in listed if line.endswith("(a value)")]) >= 2
    assert "numbers taken out of tensors of several samples" in str(tape.explain())


@pytest.mark.parametrize("name", QUIET)
def test_quiet(name: str) -> None:
    tape = recorded(Between(QUIET[name]), torch.randn(N, 4))
    assert warned(tape) == []
    assert "losses.mean().item()" in tape.explain().numbers[-1]  # the log, after the losses


def test_a_single_sample_meets_nobody() -> None:
    tape = recorded(Between(TAKEN["item of a norm"]), torch.randn(1, 4))
    assert warned(tape) == []
    assert tape.explain().numbers == ()


def test_other_questions_do_not_warn() -> None:
    tape = recorded(Between(TAKEN["item of a norm"]), torch.randn(N, 4))
    tape.norms(), tape.grads(), tape.weighted_sum(torch.ones(N))  # warnings are errors here


def test_a_number_after_the_losses_is_a_log() -> None:
    model, x = nn.Linear(4, 3), torch.randn(N, 4)
    with persample.record(model) as tape:
        losses = model(x).square().sum(1)
        losses.mean().item(), losses.tolist(), losses.detach().numpy(), float(losses.detach().max())
        if losses.mean() > 1e6:
            raise AssertionError
        tape.backward(losses)
    assert warned(tape) == []
    assert len(tape.explain().numbers) == 5


def test_the_first_line_of_a_loop_is_listed_once() -> None:
    def repeated(h: Tensor) -> Tensor:
        for _ in range(5):
            h = h / h.norm().item()
        return h

    tape = recorded(Between(repeated), torch.randn(N, 4))
    assert len(tape.explain().numbers) == 2
    assert len(warned(tape)) == 1


class Experts(nn.Module):
    """Routes tokens in the ways that libraries do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        mask = F.one_hot(chosen, 3).permute(2, 1, 0)
        out = torch.zeros_like(x)
        if self.way == "hit":
            hit = mask.sum((-1, -2)).gt(0).nonzero()
            used = [int(e.item()) for e in hit]
        elif self.way == "counts":
            counts = torch.bincount(chosen.flatten(), minlength=3).tolist()
            used = [e for e, count in enumerate(counts) if count]
        elif self.way == "array":
            used = sorted(set(chosen.flatten().numpy().tolist()))
        else:
            used = [e for e in range(3) if mask[e].any()]
        for e in used:
            place, row = torch.where(mask[e])
            out = out.index_add(0, row, self.experts[e](x[row]) * weights[row, place, None])
        return out


@pytest.mark.parametrize("way", ["hit", "counts", "array", "any"])
def test_experts_are_routed_quietly(way: str) -> None:
    tape = recorded(Experts(way), torch.randn(N, 4))
    assert warned(tape) == []


class Padded(nn.Module):
    """Cuts padding off, and packs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 3, batch_first=True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        tokens = tokens[:, : lengths.max()]
        tokens = tokens[:, : int(lengths.max().item())]
        packed = pack_padded_sequence(
            self.table(tokens), lengths.tolist(), batch_first=True, enforce_sorted=False
        )
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=7)[0]


def test_sizes_of_padding_are_quiet() -> None:
    lengths = torch.tensor([3, 5, 2, 4, 5, 1])
    tape = recorded(Padded(), torch.randint(9, (N, 7)), lengths)
    assert warned(tape) == []


def test_each_batch_of_a_loop_is_judged_anew() -> None:
    model = Between(lambda h: h)
    for k in range(3):
        model.function = TAKEN["item of a norm"] if k == 1 else QUIET["nothing"]
        assert bool(warned(recorded(model, torch.randn(N, 4)))) == (k == 1)


def test_a_branch_that_couples_samples() -> None:
    """What the warning is about: the bound does not hold for such a program."""
    torch.manual_seed(0)
    model = Between(TAKEN["item of a norm"])
    x = torch.randn(N, 4)
    x[0] *= 1e4
    with pytest.warns(persample.ExtractedNumberWarning):
        whole = recorded(model, x).clipped_sum(1e-3)
    with pytest.warns(persample.ExtractedNumberWarning):
        rest = recorded(model, x[1:]).clipped_sum(1e-3)
    moved = math.sqrt(sum(float((whole[k] - rest[k]).square().sum()) for k in whole))
    assert moved > 1.5e-3
