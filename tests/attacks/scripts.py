"""Attacks by options of a recording, scalar losses and marks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    N,
    Net,
    Rows,
    Script,
    lin,
    rand,
    seeded,
    spread,
)
from .rows import CUBE, Pair, X, Y, both, found, native, scaled, two

LABELS = torch.tensor([1, 3, 1, 0])


class Masked(nn.Module):
    """Attention with a mask for pairs of steps."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.l, self.first = lin(), first

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.l(x)
        scores = (q @ q.transpose(-1, -2)).masked_fill(mask, -1e9)
        return scores.softmax(-1) @ x


class MaskFirst(Masked):
    """The same, with the mask as first argument."""

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return super().forward(x, mask)


CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)


BIG = torch.ones(6, 6, dtype=torch.bool).triu(1)


def mask_cases() -> Iterator[Script]:
    """Inputs that only look like samples."""
    m = Masked()
    run = lambda: spread(m(CUBE, CAUSAL))
    yield Script("mask (t, t), undeclared", lambda: both(m, run), EITHER)
    yield Script("mask (t, t), declared", lambda: both(m, run, constants=("mask",)), EXACT)
    yield Script("mask (t, t), by position", lambda: both(m, run, constants=(1,)), EXACT)
    yield Script("mask (t, t), by tensor", lambda: both(m, run, constants=(CAUSAL,)), EXACT)
    wrong = lambda: both(m, run, constants=("x",))
    yield Script("the samples declared constant", wrong, EITHER)
    yield Script("a constant of no such name", lambda: both(m, run, constants=("maks",)), EITHER)
    first = MaskFirst()
    six = rand(N, 6, N)
    late = lambda: spread(first(BIG, six))
    yield Script("first argument tells a wrong n", lambda: both(first, late), EITHER)
    yield Script("first argument overruled by n", lambda: both(first, late, n=N), EXACT)
    table = lambda: spread(first.l(X) @ X)
    yield Script("another matrix outside the model", lambda: both(first, table), EITHER)


def time_first() -> Iterator[Script]:
    """Samples on axis 1; steps, samples and features agree in number."""
    gru = seeded(nn.GRU(N, N))
    run = lambda: gru(CUBE)[0].square().sum((0, 2))
    yield Script("time first, dim=1", lambda: both(gru, run, dim=1), EXACT)
    yield Script("time first, dim=0", lambda: both(gru, run), REFUSED)
    by_time = lambda: gru(CUBE)[0].square().sum((1, 2))
    yield Script("time first, a loss per step", lambda: both(gru, by_time, dim=1), REFUSED)
    mha = seeded(nn.MultiheadAttention(N, 2))
    padding = torch.ones(N, N, dtype=torch.bool).triu(1)
    attend = lambda: mha(CUBE, CUBE, CUBE, key_padding_mask=padding)[0].square().sum((0, 2))
    yield Script("time first, padding (n, t)", lambda: both(mha, attend, dim=1), EITHER)
    declared = lambda: both(mha, attend, dim=1, constants=("key_padding_mask",))
    yield Script("time first, padding declared constant", declared, EITHER)
    layer = seeded(nn.TransformerEncoderLayer(N, 2, N, 0.0))
    encode = lambda: layer(CUBE).square().sum((0, 2))
    yield Script("time first, encoder layer", lambda: both(layer, encode, dim=1), EXACT)
    last = Net(lambda m, x: m.l(x.permute(2, 0, 1)), l=lin())
    final = lambda: spread(last(CUBE))
    yield Script("samples on the last axis", lambda: both(last, final, dim=2), EXACT)
    yield Script("samples on axis -1", lambda: both(last, final, dim=-1), EITHER)


SCALARS: dict[str, tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]] = {
    "sum": (EXACT, lambda v: v.sum(), lambda v: v),
    "mean": (EXACT, lambda v: v.mean(), lambda v: v / N),
    "mean plus one": (EXACT, lambda v: v.mean() + 1, lambda v: v / N),
    "sum divided": (EXACT, lambda v: v.sum() / 3, lambda v: v / 3),
    "dot with constants": (EITHER, lambda v: v @ rand(N), lambda v: v * rand(N)),
    "python sum": (EITHER, lambda v: sum(v), lambda v: v),
    "square of the mean": (REFUSED, lambda v: v.mean() ** 2, None),
    "log of the mean": (REFUSED, lambda v: v.square().mean().log(), None),
    "log-sum-exp": (REFUSED, lambda v: v.logsumexp(0), None),
    "product": (REFUSED, lambda v: v.prod(), None),
    "norm": (REFUSED, lambda v: v.norm(), None),
    "variance": (REFUSED, lambda v: v.var(), None),
    "sum times the detached sum": (
        EITHER,
        lambda v: v.sum() * v.detach().sum(),
        lambda v: v * v.detach().sum(),
    ),
    "sum times the sum": (REFUSED, lambda v: v.sum() * v.sum(), None),
    "sum times its inverse": (REFUSED, lambda v: v.sum() / (1 + v.square().sum()), None),
    "two sums": (EXACT, lambda v: v.sum() + v.square().mean(), lambda v: v + v.square() / N),
    "maximum": (EITHER, lambda v: v.max(), lambda v: v * (v == v.max())),
    "median": (EITHER, lambda v: v.median(), lambda v: v * (v == v.median())),
    "one sample": (EITHER, lambda v: v[2], lambda v: v * torch.tensor([0, 0, 1, 0])),
    "difference of two samples": (
        EITHER,
        lambda v: v[2] - v[0],
        lambda v: v * torch.tensor([-1, 0, 1, 0]),
    ),
    "half": (EITHER, lambda v: v[:2].sum(), lambda v: v * torch.tensor([1, 1, 0, 0])),
    "mean of a mask": (EITHER, lambda v: v[LABELS > 0].mean(), lambda v: v * (LABELS > 0) / 3),
    "softplus of the sum": (REFUSED, lambda v: F.softplus(v.sum()), None),
    "relu of the mean": (REFUSED, lambda v: v.mean().relu() + v.mean().neg().relu(), None),
    "clamped mean": (REFUSED, lambda v: v.mean().clamp(-1e9, 1e9), None),
    "absolute sum": (REFUSED, lambda v: v.sum().abs(), None),
    "where on the sum": (REFUSED, lambda v: torch.where(v.sum() > 0, v.sum(), 2 * v.sum()), None),
    "sum as a vector of one": (EITHER, lambda v: v.sum()[None], lambda v: v),
    "mean over (1, n)": (EXACT, lambda v: v[None].mean(), lambda v: v / N),
    "logcumsumexp, last": (REFUSED, lambda v: v.logcumsumexp(0)[-1], None),
    "cumsum, last": (EITHER, lambda v: v.cumsum(0)[-1], lambda v: v),
    "sum of a product with the flip": (REFUSED, lambda v: (v * v.flip(0)).sum(), None),
    "sum of the sorted": (EITHER, lambda v: v.sort()[0].sum(), lambda v: v),
    "weighted by rank": (
        EITHER,
        lambda v: v.sort()[0] @ torch.arange(N).double(),
        lambda v: v * v.argsort().argsort(),
    ),
}


def scalars() -> Iterator[Script]:
    """Losses that are a number."""
    model = two()
    for name, (expectation, scalar, parts) in SCALARS.items():
        parts = parts or (lambda v: v / N)
        run = lambda scalar=scalar, parts=parts: scaled(
            model, lambda: scalar(spread(model(X))), lambda: parts(spread(model(X)))
        )
        yield Script(f"scalar: {name}", run, expectation)
    ce = lambda **o: F.cross_entropy(model(X), LABELS, **o)
    yield Script(
        "scalar: cross entropy", lambda: scaled(model, ce, lambda: ce(reduction="none") / N), EXACT
    )
    yield Script(
        "scalar: cross entropy with ignored labels",
        lambda: scaled(
            model, lambda: ce(ignore_index=1), lambda: ce(ignore_index=1, reduction="none") / 2
        ),
        EITHER,
    )
    weights = torch.arange(1.0, 5).double()
    yield Script(
        "scalar: cross entropy with class weights",
        lambda: scaled(
            model,
            lambda: ce(weight=weights),
            lambda: ce(weight=weights, reduction="none") / weights[LABELS].sum(),
        ),
        EITHER,
    )
    yield Script(
        "scalar: batchmean",
        lambda: scaled(
            model,
            lambda: F.kl_div(model(X), Y.softmax(1), reduction="batchmean"),
            lambda: F.kl_div(model(X), Y.softmax(1), reduction="none").sum(1) / N,
        ),
        EXACT,
    )
    decay = lambda: spread(model(X)).sum() + model.l.weight.square().sum()
    yield Script(
        "scalar: sum and weight decay",
        lambda: scaled(model, decay, lambda: spread(model(X))),
        REFUSED,
    )
    mean_decay = lambda: (spread(model(X)) + model.l.weight.square().sum()).mean()
    yield Script(
        "scalar: mean of regularised losses",
        lambda: scaled(
            model, mean_decay, lambda: (spread(model(X)) + model.l.weight.square().sum()) / N
        ),
        EITHER,
    )
    learned = lambda: (spread(model(X)) * model(X)[:, 0]).sum() / model(X)[:, 0].sum()
    yield Script(
        "scalar: normalised by learned weights",
        lambda: scaled(model, learned, lambda: spread(model(X))),
        REFUSED,
    )
    by_weight = lambda: spread(model(X)).mean() * model.l.weight.sum()
    yield Script(
        "scalar: mean times a parameter",
        lambda: scaled(model, by_weight, lambda: spread(model(X)) * model.l.weight.sum() / N),
        EITHER,
    )


def marks() -> Iterator[Script]:
    """Samples named by the user."""
    model = two()
    ids = torch.tensor([0, 0, 1, 2, 2, 2])
    rows = rand(6, N)

    def grouped(n: int, chosen: Tensor) -> Rows:
        each = native(model, spread(model(rows)))
        shape = lambda g: g.new_zeros(n, *g.shape[1:])
        keep = chosen >= 0
        return {k: shape(g).index_add(0, chosen[keep], g[keep]) for k, g in each.items()}

    run = lambda: spread(model(rows))
    options = {"n": 3, "sample_ids": ids}
    yield Script("sample_ids", lambda: (found(model, run, **options), grouped(3, ids)), EITHER)
    mixed = torch.tensor([2, 0, 1, 0, 2, 1])
    options = {"n": 3, "sample_ids": mixed}
    yield Script(
        "sample_ids, interleaved", lambda: (found(model, run, **options), grouped(3, mixed)), EITHER
    )
    halves = lambda: spread(model(rows).view(3, 2, N).sum(1))
    yield Script(
        "sample_ids, grouped as declared by pairs",
        lambda: (
            found(model, halves, n=3, sample_ids=torch.arange(3).repeat_interleave(2)),
            native(model, halves()),
        ),
        EITHER,
    )
    yield Script(
        "sample_ids, grouped otherwise",
        lambda: (found(model, halves, n=3, sample_ids=mixed), native(model, halves())),
        REFUSED,
    )
    yield Script(
        "sample_ids out of range",
        lambda: (found(model, run, n=2, sample_ids=ids), grouped(3, ids)),
        REFUSED,
    )
    yield Script(
        "sample_ids, none for one row",
        lambda: (
            found(model, run, n=3, sample_ids=torch.tensor([0, -1, 1, 2, 2, 2])),
            grouped(3, torch.tensor([0, -1, 1, 2, 2, 2])),
        ),
        EITHER,
    )
    yield Script("mark with ids", lambda: (marked(model, rows, ids), grouped(3, ids)), EITHER)
    yield Script(
        "mark the wrong axis",
        lambda: (marked_axis(model, 1), native(model, spread(model(X)))),
        EITHER,
    )
    yield Script("gradient penalty of a marked input", penalty, EITHER)
    yield Script("input that requires a gradient", leaf_input, EXACT)
    yield Script("input from another model", other_model, EXACT)


def marked(model: nn.Module, rows: Tensor, ids: Tensor) -> Rows:
    """Mark instead of passing sample_ids."""
    with persample.record(model, n=3) as tape:
        tape.backward(spread(model(tape.mark(rows, ids=ids))))
    return tape.grads()


def marked_axis(model: nn.Module, dim: int) -> Rows:
    """A mark that contradicts the model: its layers mix what was marked."""
    with persample.record(model) as tape:
        tape.backward(spread(model(tape.mark(X.clone(), dim=dim))))
    return tape.grads()


def penalty() -> Pair:
    """The gradient by the input, differentiated again."""
    model = two()

    def losses(mark: Callable[[Tensor], Tensor]) -> Tensor:
        x = mark(X.clone().requires_grad_())
        (grad,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return (grad.norm(dim=1) - 1).square()

    with persample.record(model) as tape:
        tape.backward(losses(tape.mark))
    return tape.grads(), native(model, losses(lambda t: t))


def leaf_input() -> Pair:
    """Adversarial training, or a saliency map."""
    model, x = two(), X.clone().requires_grad_()
    return both(model, lambda: spread(model(x)))


def other_model() -> Pair:
    """Features with a gradient history that is not recorded."""
    model, encoder = two(), lin(seed=9)
    return both(model, lambda: spread(model(encoder(X))))


def scripts() -> Iterator[Script]:
    """All of this file."""
    return chain(mask_cases(), time_first(), scalars(), marks())
