"""What users write in forward(): routing, packing, padding, graphs; with a layer behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from .base import EITHER, EXACT, REFUSED, Case, N, Table, lin, on_module, rand

T = 3
LENGTHS = [3, 1, 2, 3]
ROWS = torch.arange(N).repeat_interleave(T)
SOURCE = torch.arange(N * T)
TARGET = SOURCE.view(N, T).roll(1, 1).flatten()
TRIANGLE = torch.ones(N, N, dtype=torch.float64).tril().to_sparse()
TRIANGLES = torch.stack([TRIANGLE.to_dense(), 2 * TRIANGLE.to_dense()]).to_sparse()


def by_mask(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Rows that a mask chooses, through a layer, and back into zeros."""
    h = m.l(x)
    out = torch.zeros_like(h)
    out[mask] = m.k(h[mask])
    return m.k(out)


def of_some(x: Tensor) -> Tensor:
    """A mask of tokens that leaves two samples without any."""
    mask = x.sum(2) > -10
    mask[1] = mask[3] = False
    return mask


def unpadded(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Tokens without padding in one row, and back by a flat buffer."""
    chosen = mask.flatten().nonzero().flatten()
    out = torch.zeros(N * T, N, dtype=x.dtype)
    out[chosen] = m.k(m.l(x).reshape(-1, N)[chosen])
    return m.k(out.view(N, T, N))


def by_keys(m: Any, x: Tensor, *, numbers: bool = True) -> Tensor:
    """Each sample through the layer of its key."""
    h, keys = m.l(x), (x.sum((1, 2)) > 0).long()
    out = torch.zeros_like(h)
    for key in keys.unique().tolist() if numbers else keys.unique():
        chosen = keys == key
        out[chosen] = (m.k if key else m.l)(h[chosen])
    return out


def keys_of(x: Tensor) -> Tensor:
    """The keys that occur in a batch, as numbers to compute with."""
    return (10 * x[:, 0, 0]).long().unique().double()


def counted(m: Any, x: Tensor) -> Tensor:
    """Scaled by how many samples share a key."""
    keys = (x.sum((1, 2)) > 0).long()
    _, inverse, counts = keys.unique(return_inverse=True, return_counts=True)
    return m.k(m.l(x)) / counts[inverse].view(-1, 1, 1)


def experts(m: Any, x: Tensor) -> Tensor:
    """The best two of four experts for each token."""
    h = m.l(x).reshape(-1, N)
    weights, chosen = h.softmax(-1).topk(2, -1)
    out = torch.zeros_like(h)
    for expert in range(N):
        row, column = (chosen == expert).nonzero(as_tuple=True)
        out.index_add_(0, row, m.k(h[row]) * weights[row, column, None] * (expert + 1))
    return out.view_as(x)


def capacity(m: Any, x: Tensor) -> Tensor:
    """Slots of experts by counting over the whole batch."""
    h = m.l(x).reshape(-1, N)
    hot = F.one_hot(h.argmax(-1), N)
    place = (hot.cumsum(0) * hot).sum(-1) - 1
    slots = h.new_zeros(N, 2, N)
    kept = place < 2
    slots[h.argmax(-1)[kept], place[kept]] = h[kept]
    return m.k(slots).reshape(N, -1)


def attention_of_edges(m: Any, x: Tensor) -> Tensor:
    """A graph attention layer: a softmax over each node's edges."""
    h = m.l(x).reshape(-1, N)
    score = (h[SOURCE] * h[TARGET]).sum(1)
    top = torch.zeros(N * T, dtype=x.dtype).scatter_reduce(0, TARGET, score.detach(), "amax")
    weight = (score - top[TARGET]).exp()
    total = torch.zeros(N * T, dtype=x.dtype).scatter_add(0, TARGET, weight)
    edges = h[SOURCE] * (weight / total[TARGET])[:, None]
    return m.k(torch.zeros_like(h).index_add(0, TARGET, edges)).view_as(x)


def reduced(m: Any, x: Tensor, how: str, rows: Tensor = ROWS) -> Tensor:
    """Tokens of each sample by scatter_reduce."""
    h = m.l(x).reshape(-1, N)
    zeros = torch.zeros(N, N, dtype=x.dtype)
    return m.k(zeros.scatter_reduce(0, rows[:, None].expand_as(h), h, how, include_self=False))


def in_pieces(m: Any, x: Tensor) -> Tensor:
    """One sample after the other, each padded, all through one layer."""
    h = m.l(x)
    padded = [F.pad(h[i, :k], (0, 0, 0, T - k)) for i, k in enumerate(LENGTHS)]
    return m.k(torch.cat(padded)).view(N, T, N)


def tokens_first(m: Any, x: Tensor) -> Tensor:
    """A learned token before each sample's own rows, of different numbers."""
    rows = [torch.cat([m.b[None], m.l(x[i, :k])]) for i, k in enumerate(LENGTHS)]
    parts = m.k(torch.cat(rows)).split([k + 1 for k in LENGTHS])
    return torch.stack([part.softmax(0).sum(0) for part in parts])


ROUTED: Table = {
    "rows by mask": (EXACT, lambda m, x: by_mask(m, x, m.l(x).sum(2) > 0)),
    "rows by mask, of some samples": (EXACT, lambda m, x: by_mask(m, x, of_some(x))),
    "samples by mask": (EXACT, lambda m, x: by_mask(m, x, torch.tensor([True, False] * 2))),
    "unpadded and padded": (EXACT, lambda m, x: unpadded(m, x, x.sum(2) > -1)),
    "unpadded, some are empty": (EXACT, lambda m, x: unpadded(m, x, of_some(x))),
    "unique keys": (EXACT, by_keys),
    "unique keys as tensors": (EITHER, lambda m, x: by_keys(m, x, numbers=False)),
    "scaled by the sum of unique keys": (REFUSED, lambda m, x: m.k(m.l(x)) * keys_of(x).sum()),
    "shifted by the least of unique keys": (REFUSED, lambda m, x: m.k(m.l(x) - keys_of(x)[0])),
    "counts of keys": (REFUSED, counted),
    "experts": (EXACT, experts),
    "experts with capacity": (REFUSED, capacity),
    "sorted by length and back": (
        EXACT, lambda m, x: m.k(m.l(x)[(o := (x > 0).sum((1, 2)).argsort())])[o.argsort()]),
    "torch.cond": (
        EXACT, lambda m, x: torch.cond(x.sum() > 0, lambda h: m.k(h), lambda h: m.k(h) * 2,
                                       (m.l(x),))),
    "torch.cond that mixes": (
        REFUSED, lambda m, x: torch.cond(x.sum() > 99, lambda h: h * 1, lambda h: h - h.mean(0),
                                         (m.l(x),))),
}  # fmt: skip

GATHERED: Table = {
    "edges": (EXACT, attention_of_edges),
    "scatter_reduce, mean": (EXACT, lambda m, x: reduced(m, x, "mean")),
    "scatter_reduce, largest": (EXACT, lambda m, x: reduced(m, x, "amax")),
    "scatter_reduce, over samples": (
        REFUSED, lambda m, x: reduced(m, x, "mean", torch.arange(N * T) % N)),
    "segment_reduce": (
        EXACT, lambda m, x: m.k(torch.segment_reduce(
            m.l(x).reshape(-1, N), "mean", lengths=torch.full((N,), T), axis=0))),
    "segment_reduce over samples": (
        REFUSED, lambda m, x: m.k(torch.segment_reduce(
            m.l(x).reshape(-1, N), "sum", lengths=torch.tensor([4, 4, 2, 2]), axis=0))),
    "segment_reduce of features": (
        EXACT, lambda m, x: m.k(torch.segment_reduce(
            m.l(x).permute(2, 0, 1).contiguous(), "max", lengths=torch.ones(N).long(), axis=0,
        ).permute(1, 2, 0))),
    "put": (
        EXACT, lambda m, x: m.k(torch.zeros_like(x).put(
            torch.arange(x.numel()) - x.numel(), m.l(x).flatten()))),
    "put over another": (REFUSED, lambda m, x: m.k(m.l(x).put(torch.arange(4), m.l(x)[2, 0]))),
    "put, added": (
        REFUSED, lambda m, x: m.k(torch.zeros(N, N, dtype=x.dtype).put(
            torch.arange(x.numel()) % 16, m.l(x).flatten(), accumulate=True))),
    "to sparse and back": (EXACT, lambda m, x: m.k(m.l(x).to_sparse().to_dense())),
    "sparse rows and back": (EXACT, lambda m, x: m.k(m.l(x).to_sparse(1).coalesce().to_dense())),
    "a sparse matrix times columns": (
        EXACT, lambda m, x: m.k(torch.sparse.mm(TRIANGLE, m.l(x[:, 0]).T).T)),
    "a sparse matrix times some columns of each": (
        EXACT, lambda m, x: m.k((TRIANGLE @ m.l(x).reshape(-1, N).T).T.view(N, T, N))),
    "sparse matrices times columns": (
        EXACT, lambda m, x: m.k(torch.bmm(TRIANGLES, m.l(x[:, 0]).T.expand(2, N, N)).sum(0).T)),
    "sparse matrices times a matrix of each": (
        EXACT, lambda m, x: m.k(torch.bmm(
            TRIANGLE.to_dense().expand(N, N, N).to_sparse(), m.l(x[:, :1].expand(N, N, N))))),
    "sparse matrices times rows": (REFUSED, lambda m, x: m.k(torch.bmm(
        TRIANGLES, m.l(x[:, 0]).expand(2, N, N)).sum(0))),
    "a sparse matrix times columns, then rows": (
        REFUSED, lambda m, x: m.k(TRIANGLE @ (TRIANGLE @ m.l(x[:, 0]).T).T)),
    "a sparse tensor and a parameter": (REFUSED, lambda m, x: m.k(m.l(x[:, 0]).to_sparse())),
}  # fmt: skip

PADDED: Table = {
    "pad_sequence": (
        EXACT, lambda m, x: m.k(pad_sequence(
            [h[:k] for h, k in zip(m.l(x), LENGTHS, strict=True)], batch_first=True))),
    "padded pieces, then a layer": (EXACT, in_pieces),
    "tokens before pieces, then a layer": (EXACT, tokens_first),
    "siamese": (
        EXACT, lambda m, x: torch.mul(*m.l(torch.cat([x, x.flip(1)])).chunk(2))),
    "siamese, the other way round": (
        REFUSED, lambda m, x: torch.mul(*m.l(torch.cat([x, x.flip(0)])).chunk(2))),
    "windows over the batch": (
        REFUSED, lambda m, x: m.k(m.l(x).reshape(-1, 2, N).flatten(1)[:, :N]).reshape(N, -1)[:, :1]
        + m.l(x).reshape(-1, N).unfold(0, 4, 1).sum(-1)[:N]),
    "one piece that holds two samples": (
        REFUSED, lambda m, x: m.k(torch.stack([m.l(x[i : i + 2]).mean((0, 1)) for i in range(3)]))),
    "packed padding, losses by token": (
        EXACT, lambda m, x: in_pieces(m, x).sum(1) + m.b),
}  # fmt: skip


def cases() -> Iterator[Case]:
    """Every idiom on three tokens of four samples."""
    parts = {"l": lin(), "k": lin(seed=3), "b": rand(N)}
    for prefix, table in (("routed", ROUTED), ("gathered", GATHERED), ("padded", PADDED)):
        yield from on_module(f"idiom, {prefix}", table, rand(N, T, N), **parts)
