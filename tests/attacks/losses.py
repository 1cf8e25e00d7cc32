"""Attacks by the losses: permuted, pooled, contrastive, weighted, labels of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Net,
    lin,
    rand,
)

PERM = torch.tensor([2, 0, 3, 1])


LossTable = dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]]


def ce(out: Tensor, y: Tensor) -> Tensor:
    """One cross entropy per sample."""
    return F.cross_entropy(out, y, reduction="none")


def nce(a: Tensor, b: Tensor) -> Tensor:
    """In-batch negatives."""
    return F.cross_entropy(a @ b.T, torch.arange(a.shape[0]), reduction="none")


CLASSES: LossTable = {  # out (n, n), labels (n,)
    "cross entropy": (EXACT, ce),
    "nll of log_softmax": (EXACT, lambda o, y: F.nll_loss(o.log_softmax(-1), y, reduction="none")),
    "nll of log_softmax over samples": (
        REFUSED,
        lambda o, y: F.nll_loss(o.log_softmax(0), y, reduction="none"),
    ),
    "of the transpose": (REFUSED, lambda o, y: ce(o.T, y)),
    "labels rolled": (EITHER, lambda o, y: ce(o, y.roll(1))),
    "label smoothing": (
        EXACT,
        lambda o, y: F.cross_entropy(o, y, reduction="none", label_smoothing=0.1),
    ),
    "ignore_index": (EXACT, lambda o, y: F.cross_entropy(o, y, reduction="none", ignore_index=0)),
    "class weights": (
        EXACT,
        lambda o, y: F.cross_entropy(o, y, torch.arange(1.0, 5).double(), reduction="none"),
    ),
    "class weights by frequency": (
        EITHER,
        lambda o, y: F.cross_entropy(
            o, y, torch.bincount(y, minlength=N).double(), reduction="none"
        ),
    ),
    "class weights from samples": (
        EITHER,
        lambda o, y: F.cross_entropy(o, y, o[:, 0].detach().abs(), reduction="none"),
    ),
    "soft labels": (EXACT, lambda o, y: ce(o, F.one_hot(y, N).double() * 0.9 + 0.025)),
    "soft labels of others": (EITHER, lambda o, y: ce(o, o.detach().softmax(1).flip(0))),
    "soft labels of others, differentiable": (REFUSED, lambda o, y: ce(o, o.softmax(1).flip(0))),
    "soft labels, transposed": (REFUSED, lambda o, y: ce(o, o.softmax(1).T)),
    "multi margin": (EXACT, lambda o, y: F.multi_margin_loss(o, y, reduction="none")),
    "permuted": (EITHER, lambda o, y: ce(o, y)[PERM[: len(y)] if len(y) == N else slice(None)]),
    "sorted": (EITHER, lambda o, y: ce(o, y).sort()[0]),
    "doubled": (EITHER, lambda o, y: torch.cat([ce(o, y), ce(o * 2, y)])),
    "doubled, interleaved": (
        EITHER,
        lambda o, y: torch.stack([ce(o, y), ce(o * 2, y)], 1).flatten(),
    ),
    "two per sample": (EITHER, lambda o, y: torch.stack([ce(o, y), ce(o * 2, y)], 1)),
    "two per sample, first axis": (REFUSED, lambda o, y: torch.stack([ce(o, y), ce(o * 2, y)])),
    "only some samples": (EITHER, lambda o, y: ce(o, y)[: max(1, len(y) // 2)]),
    "top two": (EITHER, lambda o, y: ce(o, y).topk(min(2, len(y)))[0]),
    "of a mask": (EITHER, lambda o, y: ce(o[y > 0], y[y > 0])),
    "of a mask, labels of others": (EITHER, lambda o, y: ce(o[y > 0], y[: int((y > 0).sum())])),
    "square per sample": (EXACT, lambda o, y: ce(o, y).square()),
    "minus mean": (REFUSED, lambda o, y: ce(o, y) - ce(o, y).mean()),
    "minus detached mean": (EITHER, lambda o, y: ce(o, y) - ce(o, y).mean().detach()),
    "times detached mean": (EITHER, lambda o, y: ce(o, y) * ce(o, y).mean().detach()),
    "times the detached of others": (EITHER, lambda o, y: ce(o, y) * ce(o, y).detach().flip(0)),
    "softmax weights": (REFUSED, lambda o, y: ce(o, y) * ce(o, y).softmax(0)),
    "share of the sum": (REFUSED, lambda o, y: ce(o, y) / ce(o, y).sum()),
    "cumulative": (REFUSED, lambda o, y: ce(o, y).cumsum(0)),
    "rolled residual": (REFUSED, lambda o, y: ce(o, y) * ce(o, y).roll(1)),
    "margin to the next": (REFUSED, lambda o, y: (ce(o, y) - ce(o, y).roll(1)).relu() + ce(o, y)),
    "ranking": (REFUSED, lambda o, y: (o[:, 0] - o[:, :1]).relu().sum(1)),
    "broadcast (n,) and (n, 1)": (REFUSED, lambda o, y: (o[:, 0] - y[:, None]).square().mean(1)),
    "broadcast (n, 1) and (n,)": (EITHER, lambda o, y: (o[:, :1] - y).square().mean(1)),
    "mse broadcast": (
        REFUSED,
        lambda o, y: F.mse_loss(o[:, 0], y[:, None].double(), reduction="none").sum(1),
    ),
    "mse of columns": (EXACT, lambda o, y: F.mse_loss(o[:, 0], y.double(), reduction="none")),
    "huber against another column": (
        EXACT,
        lambda o, y: F.huber_loss(o[:, 0], o[:, 1], reduction="none"),
    ),
    "kl": (
        EXACT,
        lambda o, y: F.kl_div(
            o.log_softmax(1), o.softmax(1).detach().flip(1), reduction="none"
        ).sum(1),
    ),
    "kl to the mean prediction": (
        REFUSED,
        lambda o, y: F.kl_div(
            o.log_softmax(1), o.softmax(1).mean(0).expand_as(o), reduction="none"
        ).sum(1),
    ),
    "bce": (
        EXACT,
        lambda o, y: F.binary_cross_entropy_with_logits(
            o, F.one_hot(y, N).double(), reduction="none"
        ).mean(1),
    ),
    "bce, positive weights by frequency": (
        EITHER,
        lambda o, y: F.binary_cross_entropy_with_logits(
            o, F.one_hot(y, N).double(), pos_weight=y.double().mean() + 1, reduction="none"
        ).mean(1),
    ),
    "hinge": (EXACT, lambda o, y: (1 - o[torch.arange(len(y)), y]).relu()),
    "hinge, axes swapped": (EITHER, lambda o, y: (1 - o[y, torch.arange(len(y))]).relu()),
    "focal": (EXACT, lambda o, y: (1 - (-ce(o, y)).exp()) ** 2 * ce(o, y)),
    "entropy": (EXACT, lambda o, y: -(o.softmax(1) * o.log_softmax(1)).sum(1)),
    "mutual information": (
        REFUSED,
        lambda o, y: ce(o, y) - (o.softmax(1).mean(0) * o.softmax(1).mean(0).log()).sum(),
    ),
    "a loss per class": (REFUSED, lambda o, y: o.square().sum(0)),
    "a loss per class, grouped": (
        REFUSED,
        lambda o, y: torch.zeros(N).double().index_add(0, y, ce(o, y)),
    ),
    "own class only": (EXACT, lambda o, y: (F.one_hot(y, N) * o.square()).sum(1)),
    "own class, transposed one-hot": (
        EITHER,
        lambda o, y: (F.one_hot(y, N)[: len(o)].T[: len(o), :N] * o.square()).sum(1),
    ),
    "labels mixed": (EITHER, lambda o, y: 0.3 * ce(o, y) + 0.7 * ce(o, y.flip(0))),
    "detached maximum": (EXACT, lambda o, y: (o - o.max(1, keepdim=True)[0].detach()).exp().sum(1)),
    "detached maximum of everything": (EITHER, lambda o, y: (o - o.max().detach()).exp().sum(1)),
    "log-sum-exp over samples": (REFUSED, lambda o, y: o.logsumexp(0)),
    "diagonal of similarities": (EITHER, lambda o, y: (o @ o.T).diagonal()),
    "batch hard": (REFUSED, lambda o, y: torch.cdist(o, o + 1).max(1)[0]),
    "center loss by class": (
        REFUSED,
        lambda o, y: (o - torch.stack([o[y == k].sum(0) for k in range(N)])[y]).square().sum(1),
    ),
    "variance": (REFUSED, lambda o, y: o.square().sum(1) + (1 - o.std(0)).relu().sum()),
    "correlation": (REFUSED, lambda o, y: (F.normalize(o, dim=0).T @ F.normalize(o, dim=0)).sum(1)),
    "empty slice added": (EITHER, lambda o, y: ce(o, y) + o[:0].sum()),
    "an entry of one sample added": (REFUSED, lambda o, y: ce(o, y) + o[0, 0]),
    "python sum over samples": (REFUSED, lambda o, y: ce(o, y) * sum(ce(o, y))),
    "stacked by python": (EITHER, lambda o, y: torch.stack([o[i, y[i]] for i in range(len(y))])),
    "stacked by python, others": (
        EITHER,
        lambda o, y: torch.stack([o[-1 - i, y[i]] for i in range(len(y))]),
    ),
    "stacked by python, mixed": (
        REFUSED,
        lambda o, y: torch.stack([o[-1 - i, y[i]] * o[i, y[i]] for i in range(len(y))]),
    ),
    "torch.tensor of losses": (
        EITHER,
        lambda o, y: ce(o, y) + torch.tensor([float(v) for v in ce(o, y)]).flip(0),
    ),
    "masked mean per sample": (EXACT, lambda o, y: (o * (o > 0)).sum(1) / (o > 0).sum(1).clamp(1)),
    "masked mean by the batch's count": (EITHER, lambda o, y: (o * (o > 0)).sum(1) / (o > 0).sum()),
    "masked mean, counts broadcast wrongly": (
        EITHER,
        lambda o, y: ((o * (o > 0)) / (o > 0).sum(1).clamp(1)).sum(1),
    ),
    "importance weights": (EXACT, lambda o, y: ce(o, y) * (o[:, 0] - o[:, 1]).exp().detach()),
    "self-normalised weights": (EITHER, lambda o, y: ce(o, y) * o[:, 0].softmax(0).detach()),
    "self-normalised weights with gradient": (REFUSED, lambda o, y: ce(o, y) * o[:, 0].softmax(0)),
    "advantage": (EITHER, lambda o, y: ce(o, y) * ((y - y.double().mean()) / y.double().std())),
    "advantage of outputs": (REFUSED, lambda o, y: ce(o, y) * (o[:, 0] - o[:, 0].mean())),
}


TWO_VIEWS: LossTable = {
    "info nce": (REFUSED, nce),
    "clip": (REFUSED, lambda a, b: (nce(a, b) + nce(b, a)) / 2),
    "nce with detached keys": (EITHER, lambda a, b: nce(a, b.detach())),
    "sigmoid pairs": (
        REFUSED,
        lambda a, b: -F.logsigmoid((a @ b.T) * (2 * torch.eye(N) - 1)).sum(1),
    ),
    "triplet by roll": (
        REFUSED,
        lambda a, b: F.triplet_margin_loss(a, b, b.roll(1, 0), reduction="none"),
    ),
    "triplet by flip of features": (
        EXACT,
        lambda a, b: F.triplet_margin_loss(a, b, b.flip(1), reduction="none"),
    ),
    "cosine embedding": (
        EXACT,
        lambda a, b: F.cosine_embedding_loss(a, b, torch.ones(len(a)), reduction="none"),
    ),
    "cosine embedding of others": (
        REFUSED,
        lambda a, b: F.cosine_embedding_loss(a, b.flip(0), torch.ones(len(a)), reduction="none"),
    ),
    "margin ranking": (
        EXACT,
        lambda a, b: F.margin_ranking_loss(a[:, 0], b[:, 0], torch.ones(len(a)), reduction="none"),
    ),
    "barlow": (
        REFUSED,
        lambda a, b: (F.normalize(a, dim=0).T @ F.normalize(b, dim=0)).square().sum(1),
    ),
    "nt-xent": (
        REFUSED,
        lambda a, b: (
            lambda z: F.cross_entropy(
                (z @ z.T).masked_fill(torch.eye(2 * N).bool(), -1e9),
                (torch.arange(2 * N) + N) % (2 * N),
                reduction="none",
            )
        )(torch.cat([a, b])),
    ),
    "manifold mixup": (REFUSED, lambda a, b: (0.3 * a + 0.7 * b.flip(0)).square().sum(1)),
    "mmd": (REFUSED, lambda a, b: (a.mean(0) - b.mean(0)).square() + a.square().sum(1)),
    "optimal transport by sorting": (
        REFUSED,
        lambda a, b: (a.sort(0)[0] - b.sort(0)[0]).square().sum(1),
    ),
    "byol": (EXACT, lambda a, b: 2 - 2 * F.cosine_similarity(a, b.detach())),
    "in-batch softmax with own positives": (
        REFUSED,
        lambda a, b: (a * b).sum(1) - (a @ b.T).logsumexp(1),
    ),
    "self-normalised, other axis": (REFUSED, lambda a, b: (a * b).sum(1) - (a @ b.T).logsumexp(0)),
    "cross entropy between views": (
        EXACT,
        lambda a, b: F.cross_entropy(a, b.softmax(1), reduction="none"),
    ),
    "sinkhorn codes": (
        EITHER,
        lambda a, b: F.cross_entropy(a, b.softmax(0).detach(), reduction="none"),
    ),
    "memory queue": (
        EXACT,
        lambda a, b: F.cross_entropy(a @ rand(N, N, seed=9).T, b.argmax(1), reduction="none"),
    ),
}


def classes() -> Iterator[Case]:
    """Losses of a classifier; n labels of n classes."""
    labels = torch.tensor([1, 3, 1, 0])
    for name, (expectation, function) in CLASSES.items():
        model = Net(lambda m, x: m.l(x), l=lin())
        loss = lambda model, batch, function=function: function(model(batch[0]), batch[1])
        yield Case(f"loss: {name}", model, (rand(N, N), labels), loss, expectation)


def views() -> Iterator[Case]:
    """Losses of two embeddings of the same samples."""
    for name, (expectation, function) in TWO_VIEWS.items():
        model = Net(lambda m, x: (m.l(x), m.k(x).tanh()), l=lin(), k=lin(seed=2))
        loss = lambda model, batch, function=function: function(*model(batch[0]))
        yield Case(f"views: {name}", model, (rand(N, N),), loss, expectation)


def cases() -> Iterator[Case]:
    """All of this file."""
    return chain(classes(), views())
