"""Attacks by losses per token, regularisers and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Net,
    ints,
    lin,
    rand,
    seeded_losses,
)

LossTable = dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]]


def ce(out: Tensor, y: Tensor) -> Tensor:
    """One cross entropy per sample."""
    return F.cross_entropy(out, y, reduction="none")


def tokens() -> Iterator[Case]:
    """Losses per token; n steps of n classes."""
    table: LossTable = {
        "sum per sample": (EXACT, lambda o, y: ce(o.transpose(1, 2), y).sum(1)),
        "without transposing": (EXACT, lambda o, y: ce(o, y).sum(1)),
        "per token": (EITHER, lambda o, y: ce(o.transpose(1, 2), y)),
        "flat": (EITHER, lambda o, y: ce(o.flatten(0, 1), y.flatten())),
        "flat and grouped": (
            EXACT,
            lambda o, y: ce(o.flatten(0, 1), y.flatten()).view(-1, N).mean(1),
        ),
        "flat and grouped by time": (
            REFUSED,
            lambda o, y: ce(o.flatten(0, 1), y.flatten()).view(-1, N).mean(0),
        ),
        "time first, flat, grouped wrongly": (
            REFUSED,
            lambda o, y: ce(o.transpose(0, 1).flatten(0, 1), y.T.flatten()).view(-1, N).mean(1),
        ),
        "samples as classes": (REFUSED, lambda o, y: ce(o.permute(1, 0, 2), y).sum(1)),
        "shifted by a step": (
            EXACT,
            lambda o, y: ce(o[:, :-1].flatten(0, 1), y[:, 1:].flatten()).view(-1, 3).sum(1),
        ),
        "shifted by a sample": (
            EITHER,
            lambda o, y: ce(o[:-1].flatten(0, 1), y[1:].flatten()).view(-1, N).sum(1),
        ),
        "flat, shifted across samples": (
            EITHER,
            lambda o, y: ce(o.flatten(0, 1)[:-1], y.flatten()[1:]),
        ),
        "flat, shifted across samples, grouped": (
            REFUSED,
            lambda o, y: ce(o.flatten(0, 1)[1:-3], y.flatten()[1:-3]).view(3, N).sum(1),
        ),
        "divided by the batch's tokens": (
            EITHER,
            lambda o, y: ce(o.transpose(1, 2), y).sum(1) / (y > 0).sum(),
        ),
        "divided by own tokens": (
            EXACT,
            lambda o, y: ce(o.transpose(1, 2), y).sum(1) / (y > 0).sum(1).clamp(1),
        ),
        "masked tokens, pooled": (
            REFUSED,
            lambda o, y: ce(o[y > 0], y[y > 0]).mean() + o.sum((1, 2)),
        ),
        "ctc": (
            EXACT,
            lambda o, y: F.ctc_loss(
                o.log_softmax(-1).transpose(0, 1),
                y[:, :2].clamp(1),
                torch.full((len(o),), N),
                torch.full((len(o),), 2),
                reduction="none",
            ),
        ),
        "ctc, time as samples": (
            REFUSED,
            lambda o, y: F.ctc_loss(
                o.log_softmax(-1),
                y[:, :2].clamp(1),
                torch.full((len(o),), N),
                torch.full((len(o),), 2),
                reduction="none",
            ),
        ),
        "ctc, flat targets": (
            EITHER,
            lambda o, y: F.ctc_loss(
                o.log_softmax(-1).transpose(0, 1),
                y[:, :2].clamp(1).flatten(),
                torch.full((len(o),), N),
                torch.full((len(o),), 2),
                reduction="none",
            ),
        ),
    }
    for name, (expectation, function) in table.items():
        model = Net(lambda m, x: m.l(x), l=lin())
        loss = lambda model, batch, function=function: function(model(batch[0]), batch[1])
        batch = (rand(N, N, N), ints(N, N, seed=2))
        yield Case(f"token: {name}", model, batch, loss, expectation)


def regularised() -> Iterator[Case]:
    """Parameters in the loss itself."""
    table = {
        "weight decay on every loss": (EXACT, lambda m, o: o.sum(1) + m.l.weight.square().sum()),
        "weight decay of one row each": (
            EITHER,
            lambda m, o: o.sum(1) + m.l.weight.square().sum(1),
        ),
        "bias as losses": (EITHER, lambda m, o: o.sum(1) + m.l.bias),
        "bias times losses": (EITHER, lambda m, o: o.sum(1) * m.l.bias),
        "weight times losses": (EXACT, lambda m, o: o.sum(1) * m.l.weight.sum()),
        "orthogonality": (
            EXACT,
            lambda m, o: o.sum(1) + (m.l.weight @ m.l.weight.T - torch.eye(N)).square().sum(),
        ),
        "only the parameters": (EITHER, lambda m, o: m.l.weight.square().sum(1)),
        "expanded parameters": (EITHER, lambda m, o: m.l.weight.sum().expand(len(o))),
    }
    for name, (expectation, function) in table.items():
        model = Net(lambda m, x: m.l(x).square(), l=lin())
        loss = lambda model, batch, function=function: function(model, model(batch[0]))
        yield Case(f"regularised: {name}", model, (rand(N, N),), loss, expectation)


def seeds() -> Iterator[Case]:
    """Random numbers: the same in every run of the whole batch."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "dropout": lambda: nn.Dropout(0.5),
        "dropout of channels": lambda: nn.Dropout1d(0.5),
        "alpha dropout": lambda: nn.AlphaDropout(0.3),
        "rrelu": lambda: nn.RReLU(),
    }
    for name, make in makers.items():
        model = Net(lambda m, x: m.k(m.d(m.l(x))), l=lin(), k=lin(seed=1), d=make())
        yield Case(f"random: {name}", model, (rand(N, N, N),), seeded_losses, EXACT)
    noise: dict[str, tuple[str, Callable[[nn.Module, Tensor], Tensor]]] = {
        "reparametrised": (EXACT, lambda m, x: m.l(x) + m.k(x).exp() * torch.randn_like(x)),
        "noise (n, d) on a transpose": (REFUSED, lambda m, x: m.l(x).T * torch.randn(N, N)),
        "gumbel": (EXACT, lambda m, x: F.gumbel_softmax(m.l(x))),
        "gumbel over samples": (REFUSED, lambda m, x: F.gumbel_softmax(m.l(x), dim=0)),
        "hard gumbel": (EXACT, lambda m, x: F.gumbel_softmax(m.l(x), hard=True)),
        "randperm of samples": (REFUSED, lambda m, x: m.l(x) * m.k(x)[torch.randperm(N)]),
        "multinomial": (EXACT, lambda m, x: m.l(x).gather(1, m.k(x).softmax(1).multinomial(1))),
        "multinomial over samples": (
            REFUSED,
            lambda m, x: m.l(x) * m.l(x)[m.k(x)[:, 0].softmax(0).multinomial(N)],
        ),
        "normal distribution": (
            EXACT,
            lambda m, x: torch.distributions.Normal(m.l(x), m.k(x).exp()).rsample(),
        ),
        "log_prob": (
            EXACT,
            lambda m, x: torch.distributions.Normal(m.l(x), m.k(x).exp()).log_prob(x).sum(1),
        ),
        "log_prob broadcast": (
            REFUSED,
            lambda m, x: (
                torch.distributions.Normal(m.l(x)[:, None], 1.0).log_prob(m.k(x)[None]).sum((1, 2))
            ),
        ),
        "stochastic depth": (EXACT, lambda m, x: x + m.l(x) * (torch.rand(len(x), 1) > 0.5)),
    }
    for name, (expectation, body) in noise.items():
        model = Net(body, l=lin(), k=lin(seed=1))
        yield Case(f"random: {name}", model, (rand(N, N),), seeded_losses, expectation)


def cases() -> Iterator[Case]:
    """All of this file."""
    return chain(tokens(), regularised(), seeds())
