"""Attacks by gathering, scattering and routing."""

from __future__ import annotations

from collections.abc import Iterator
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
    Table,
    lin,
    on_hidden,
    on_module,
    on_pair,
    rand,
)

PERM = torch.tensor([2, 0, 3, 1])


INVERSE = PERM.argsort()


PAIRED = torch.tensor([0, 0, 1, 1])


MASK = torch.tensor([True, False, False, True])


EVERY = torch.arange(N)


LABELS = torch.tensor([3, 0, 1, 0])


def zeros(*shape: int) -> Tensor:
    """A float64 buffer."""
    return torch.zeros(*(shape or (N, N)), dtype=torch.float64)


INDEXING: Table = {
    "permuted": (EITHER, lambda h: h[PERM]),
    "permuted, residual": (REFUSED, lambda h: h * h[PERM]),
    "permuted and back": (EXACT, lambda h: h * h[PERM][INVERSE]),
    "permuted twice": (REFUSED, lambda h: h * h[PERM][PERM]),
    "permuted by data": (REFUSED, lambda h: h * h[h[:, 0].argsort()]),
    "permuted by data and back": (EITHER, lambda h: h * unsorted(h)),
    "permuted by itself, no residual": (EITHER, lambda h: h[h[:, 0].argsort()]),
    "index_select 0": (REFUSED, lambda h: h * h.index_select(0, PERM)),
    "index_select 1": (EXACT, lambda h: h * h.index_select(1, PERM)),
    "gather 0": (REFUSED, lambda h: h.gather(0, PERM[:, None].expand(N, N)) * h),
    "gather 0 with a column of indices": (
        REFUSED,
        lambda h: h.gather(0, PERM.expand(N, N)),
    ),
    "gather 1": (EXACT, lambda h: h.gather(1, PERM.expand(N, N))),
    "take_along_dim 0": (REFUSED, lambda h: h.take_along_dim(h.argsort(0), 0)),
    "take_along_dim 1": (EXACT, lambda h: h.take_along_dim(h.argsort(1), 1)),
    "take of flat": (REFUSED, lambda h: h.take(torch.arange(16).view(N, N).T)),
    "take of flat, in order": (EITHER, lambda h: h.take(torch.arange(16).view(N, N))),
    "own entry by label": (EXACT, lambda h: h[EVERY, LABELS].square()),
    "own entry by label, axes swapped": (EITHER, lambda h: h[PERM, EVERY].square()),
    "another sample's entry": (REFUSED, lambda h: h * h[LABELS, EVERY][:, None]),
    "label columns": (EXACT, lambda h: h[:, LABELS]),
    "label columns, index of samples first": (EITHER, lambda h: h[LABELS]),
    "two advanced indices apart": (
        EXACT,
        lambda h: h.view(N, 2, 2)[:, PERM % 2, PERM // 2],
    ),
    "two advanced indices around a slice": (
        EITHER,
        lambda h: h.view(N, 2, 2)[EVERY, :, LABELS % 2],
    ),
    "advanced indices move the axis in front": (
        EITHER,
        lambda h: h.view(N, 2, 2)[:, None, :, [0, 1]].transpose(0, 1)[0],
    ),
    "index moves time before samples": (
        REFUSED,
        lambda h: h.view(1, N, N).expand(N, N, N)[EVERY, :, LABELS],
    ),
    "negative index": (REFUSED, lambda h: h * h[[-1, -2, -3, -4]]),
    "mask of samples": (EITHER, lambda h: h[MASK]),
    "mask of entries": (EITHER, lambda h: h[h.detach() > 0].square()),
    "mask of entries, regrouped": (REFUSED, lambda h: h[~torch.eye(N).bool()].view(3, N)),
    "masked_select, regrouped": (
        REFUSED,
        lambda h: h.masked_select(torch.tensor([True, True, True, False])).view(3, N),
    ),
    "masked_fill": (EXACT, lambda h: h.masked_fill(h > 0, 0.5)),
    "masked_fill by a mask of samples": (EXACT, lambda h: h.masked_fill(MASK[:, None], 0.0)),
    "masked_fill with another sample": (REFUSED, lambda h: h.masked_fill(h > 0, h[0, 0])),
    "index_fill": (EITHER, lambda h: h.index_fill(0, PAIRED, 0.0)),
    "scatter 1": (EXACT, lambda h: zeros().scatter(1, PERM.expand(N, N), h)),
    "scatter 0": (REFUSED, lambda h: zeros().scatter(0, PERM[:, None].expand(N, N), h) * h),
    "scatter_add pairs": (REFUSED, lambda h: zeros().scatter_add(0, PAIRED.expand(N, N).T, h)),
    "scatter_reduce pairs": (
        REFUSED,
        lambda h: zeros().scatter_reduce(0, PAIRED.expand(N, N).T, h, "amax"),
    ),
    "index_add in order": (EXACT, lambda h: zeros().index_add(0, EVERY, h)),
    "index_add pairs": (REFUSED, lambda h: zeros().index_add(0, PAIRED, h)),
    "index_add on itself": (REFUSED, lambda h: h.index_add(0, PERM, h)),
    "index_copy on itself": (REFUSED, lambda h: h * h.index_copy(0, PERM[:2], h[:2])),
    "index_put": (REFUSED, lambda h: h * h.index_put((PERM,), h)),
    "index_put accumulate": (REFUSED, lambda h: h.index_put((PAIRED,), h, accumulate=True)),
    "index_reduce": (REFUSED, lambda h: h.index_reduce(0, PERM, h, "prod")),
    "masked_scatter": (REFUSED, lambda h: h * zeros().masked_scatter(MASK[:, None], h)),
    "masked_scatter, all": (EITHER, lambda h: zeros().masked_scatter(MASK[:, None] | True, h)),
    "select_scatter": (REFUSED, lambda h: h * h.select_scatter(h[0], 0, 1)),
    "slice_scatter": (REFUSED, lambda h: h * h.slice_scatter(h[:2], 0, 2, 4)),
    "slice_scatter of features": (EXACT, lambda h: h.slice_scatter(h[:, :2] ** 2, 1, 2, 4)),
    "diagonal_scatter": (REFUSED, lambda h: h.diagonal_scatter(h[0])),
    "segments": (REFUSED, lambda h: torch.segment_reduce(h, "sum", lengths=torch.tensor([1, 3]))),
    "one_hot matmul pools samples": (REFUSED, lambda h: F.one_hot(PAIRED, N).double().T @ h),
    "permutation matrix": (REFUSED, lambda h: h * (torch.eye(N)[PERM].double() @ h)),
    "embedding_bag of samples": (
        REFUSED,
        lambda h: F.embedding_bag(PERM.expand(N, N).contiguous(), h, mode="sum"),
    ),
    "nonzero and put back": (EXACT, lambda h: nonzero_route(h)),
    "unique by rows": (EITHER, lambda h: h[torch.unique(PAIRED)]),
    "choose": (REFUSED, lambda h: h * h[h[:, 0].argmax()]),
    "python max over samples": (REFUSED, lambda h: h * max(h[i, 0] for i in range(N))),
    "ranks meet a parameter": (REFUSED, lambda h: h.sort(0)[0].sin()),
    "columns chosen by the batch": (REFUSED, lambda h: h[:, h.detach().sum(0) > 0].sin()),
    "topk samples": (REFUSED, lambda h: h[h.sum(1).topk(2)[1]] * h[:2]),
}


def unsorted(h: Tensor) -> Tensor:
    """Sort the samples by a value of their own, work, and undo it."""
    order = h[:, 0].argsort()
    return h[order].relu()[order.argsort()]


def nonzero_route(h: Tensor) -> Tensor:
    """Two branches by the sign of an entry, joined again."""
    out = zeros()
    for branch in (h[:, 0] > 0, h[:, 0] <= 0):
        index = branch.nonzero().squeeze(1)
        out = out.index_copy(0, index, h[index] * (2 + index[:, None] * 0))
    return out


def route_add(m: torch.nn.Module, x: Tensor) -> Tensor:
    """Experts by the argmax of a gate, joined by index_add_."""
    gate = m.gate(x).softmax(-1)
    weight, expert = gate.max(-1)
    out = torch.zeros_like(x)
    for e, layer in enumerate((m.a, m.b)):
        index = (expert % 2 == e).nonzero().squeeze(1)
        out.index_add_(0, index, layer(x[index]) * weight[index, None])
    return out


def route_sorted(m: torch.nn.Module, x: Tensor) -> Tensor:
    """Experts on contiguous pieces of the samples, sorted by expert, then unsorted."""
    weight, expert = m.gate(x).softmax(-1).max(-1)
    expert = expert % 2
    order = expert.argsort(stable=True)
    pieces = x[order].split(torch.bincount(expert, minlength=2).tolist())
    out = torch.cat([layer(piece) for layer, piece in zip((m.a, m.b), pieces, strict=True)])
    back = torch.empty_like(out)
    back[order] = out
    return back * weight[:, None]


def route_unsorted(m: torch.nn.Module, x: Tensor) -> Tensor:
    """The same, but the gate's weights are applied in the wrong order."""
    weight, expert = m.gate(x).softmax(-1).max(-1)
    order = (expert % 2).argsort(stable=True, descending=True)
    return m.a(x[order]) * weight[:, None] * torch.arange(1, 5)[:, None]


def route_capacity(m: torch.nn.Module, x: Tensor) -> Tensor:
    """Every expert takes one sample, the first; the rest is dropped."""
    choice = F.one_hot(m.gate(x).argmax(-1) % 2, 2)
    kept = choice * (choice.cumsum(0) <= 1)
    return kept[:, :1] * m.a(x) + kept[:, 1:] * m.b(x)


def route_dispatch(m: torch.nn.Module, x: Tensor) -> Tensor:
    """Dense dispatch: einsum of a one-hot (sample, expert, slot) with the samples and back."""
    choice = F.one_hot(m.gate(x).argmax(-1) % 2, 2)
    slot = F.one_hot((choice.cumsum(0) * choice).sum(1) - 1, N)
    dispatch = torch.einsum("ne,nc->nec", choice, slot).double()
    inside = torch.einsum("nec,nd->ecd", dispatch, x)
    done = torch.stack([m.a(inside[0]), m.b(inside[1])])
    return torch.einsum("nec,ecd->nd", dispatch, done)


def route_balance(m: torch.nn.Module, x: Tensor) -> Tensor:
    """A load-balancing term: the mean of the gate over samples."""
    gate = m.gate(x).softmax(-1)
    return m.a(x) * gate + gate.mean(0)


def route_choice(m: torch.nn.Module, x: Tensor) -> Tensor:
    """Experts choose their samples: softmax over samples."""
    gate = m.gate(x).softmax(0)
    return m.a(x) * gate


ROUTES: Table = {
    "index_add_": (EXACT, route_add),
    "sorted": (EXACT, route_sorted),
    "sorted, wrong weights": (REFUSED, route_unsorted),
    "capacity": (EITHER, route_capacity),
    "dense dispatch": (EITHER, route_dispatch),
    "balance": (REFUSED, route_balance),
    "experts choose": (REFUSED, route_choice),
}


SHIFTED: Table = {
    "temporal shift of channels": (
        EXACT,
        lambda h, g: torch.cat([h[:, :1].roll(1, 1), g[:, 1:]], 1),
    ),
    "shift of samples by halves": (
        REFUSED,
        lambda h, g: torch.cat([h[:, :2].roll(1, 0), g[:, 2:]], 1),
    ),
    "memory bank": (REFUSED, lambda h, g: torch.cat([h, g.flip(0)], 1)),
    "zip of rows": (
        REFUSED,
        lambda h, g: torch.stack([a * b for a, b in zip(h, g.flip(0), strict=True)]),
    ),
    "zip of rows, in order": (
        EXACT,
        lambda h, g: torch.stack([a * b for a, b in zip(h, g, strict=True)]),
    ),
    "interleaved": (EITHER, lambda h, g: torch.stack([h, g], 1).view(2 * N, N)),
    "interleaved, halves": (
        REFUSED,
        lambda h, g: torch.stack([h, g], 1).view(2 * N, N)[:N] * h,
    ),
}


def views_of_input() -> Iterator[Case]:
    """Writes to the input itself, before or after its use by a parameter."""
    table: Table = {
        "input rolled before any parameter": (EITHER, lambda m, x: m.l(x.roll(1, 0))),
        "input written after its use": (EITHER, lambda m, x: late_write(m, x.clone())),
        "input mixed before any parameter": (EITHER, lambda m, x: m.l(x - x.mean(0))),
        "input transposed before any parameter": (EITHER, lambda m, x: m.l(x.T)),
        "input mixed, residual": (EITHER, lambda m, x: m.l(x) * m.l(x.flip(0))),
        "input attended before any parameter": (EITHER, lambda m, x: m.l((x @ x.T).softmax(1) @ x)),
    }
    return on_module("input", table, rand(N, N), l=lin())


def late_write(m: torch.nn.Module, x: Tensor) -> Tensor:
    """The buffer that held the samples holds others afterwards."""
    first = m.l(x.clone())
    x.copy_(x.flip(0))
    return first * x


def cases() -> Iterator[Case]:
    """All of this file."""
    experts = {"gate": lin(seed=8), "a": lin(), "b": lin(seed=4)}
    return chain(
        on_hidden("index", INDEXING),
        on_module("route", ROUTES, rand(N, N), **experts),
        on_pair("shift", SHIFTED),
        views_of_input(),
    )
