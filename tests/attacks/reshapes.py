"""Attacks by reshapes, transposes and products of two tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch.nn import functional as F

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Table,
    on_hidden,
    on_pair,
    rand,
)

RESHAPES: Table = {
    "transposed square": (REFUSED, lambda h: h.T),
    "mT": (REFUSED, lambda h: h.mT),
    "adjoint": (REFUSED, lambda h: h.adjoint()),
    "transposed twice": (EXACT, lambda h: h.T.relu().T),
    "swapaxes contiguous view": (REFUSED, lambda h: h.swapaxes(0, 1).contiguous().view(N, N)),
    "permute and back through flat": (
        REFUSED,
        lambda h: h.permute(1, 0).reshape(-1).view(N, N) * h,
    ),
    "flat and back": (EXACT, lambda h: h.reshape(-1).view(N, N) * h),
    "flat, cut by one": (REFUSED, lambda h: h.flatten()[1:13].view(N, 3)),
    "flat, cut at both ends of a sample": (REFUSED, lambda h: h.flatten()[2:14].view(3, 4)),
    "flat strided": (EITHER, lambda h: h.flatten()[::2].view(N, 2)),
    "flat strided by n": (REFUSED, lambda h: h.flatten()[::N].repeat(2).view(N, 2)),
    "two halves, elementwise": (EXACT, lambda h: h.view(2, N // 2, N).relu().view(N, N)),
    "two halves, summed": (REFUSED, lambda h: h.view(2, N // 2, N).sum(0)),
    "pairs, summed": (REFUSED, lambda h: h.view(N // 2, 2, N).sum(1)),
    "pairs broadcast back": (
        REFUSED,
        lambda h: (h.view(2, 2, N) - h.view(2, 2, N).mean(1, True)).view(N, N),
    ),
    "half samples in features": (REFUSED, lambda h: h.reshape(N // 2, 2 * N)),
    "half features in samples": (EITHER, lambda h: h.reshape(2 * N, N // 2)),
    "halves swapped, residual": (
        REFUSED,
        lambda h: h * h.view(2, 2, N).transpose(0, 1).reshape(N, N),
    ),
    "rearranged to (d n)": (REFUSED, lambda h: h.T.reshape(1, -1).view(N, N)),
    "chunk and join": (EXACT, lambda h: torch.cat(h.chunk(2))),
    "chunk and join crossed": (EITHER, lambda h: torch.cat(h.chunk(2)[::-1])),
    "chunk, crossed, residual": (REFUSED, lambda h: h * torch.cat(h.chunk(2)[::-1])),
    "chunk and add": (REFUSED, lambda h: h.chunk(2)[0] + h.chunk(2)[1]),
    "chunk and join on features": (REFUSED, lambda h: torch.cat(h.chunk(2), 1)),
    "split unevenly and join": (EXACT, lambda h: torch.cat(h.split([1, 3]))),
    "split unevenly, swapped": (EITHER, lambda h: torch.cat(h.split([1, 3])[::-1])),
    "unbind and stack": (EXACT, lambda h: torch.stack([row * 2 for row in h])),
    "split by one and join": (EXACT, lambda h: torch.cat([row * 2 for row in h.split(1)])),
    "unbind and stack on features": (REFUSED, lambda h: torch.stack(list(h), 1)),
    "unbind, neighbours": (
        REFUSED,
        lambda h: torch.stack([h[i] * h[i - 1] for i in range(N)]),
    ),
    "unbind of features stacked first": (REFUSED, lambda h: torch.stack(h.unbind(1))),
    "tensor_split by indices": (EXACT, lambda h: torch.cat(torch.tensor_split(h, (1, 3)))),
    "hsplit of features": (EXACT, lambda h: torch.hstack(torch.hsplit(h, 2)[::-1])),
    "vsplit, hstack": (REFUSED, lambda h: torch.hstack(torch.vsplit(h, 2))),
    "repeat_interleave and group": (
        EXACT,
        lambda h: h.repeat_interleave(2, 0).view(N, 2, N).sum(1),
    ),
    "repeat and group wrongly": (REFUSED, lambda h: h.repeat(2, 1).view(N, 2, N).sum(1)),
    "repeat and group": (EXACT, lambda h: h.repeat(2, 1).view(2, N, N).sum(0)),
    "repeat_interleave of everything": (
        EITHER,
        lambda h: h.repeat_interleave(2).view(N, 2 * N),
    ),
    "repeat_interleave uneven": (
        EITHER,
        lambda h: h.repeat_interleave(torch.tensor([2, 0, 1, 1]), 0),
    ),
    "repeat_interleave uneven, residual": (
        REFUSED,
        lambda h: h * h.repeat_interleave(torch.tensor([2, 0, 1, 1]), 0),
    ),
    "tile and group wrongly": (REFUSED, lambda h: torch.tile(h, (2, 1)).view(N, 2, N).sum(1)),
    "stacked second, flat, grouped": (
        EXACT,
        lambda h: torch.stack([h, h * h], 1).flatten(0, 1).view(N, 2, N),
    ),
    "stacked first, flat, grouped": (
        REFUSED,
        lambda h: torch.stack([h, h * h], 0).flatten(0, 1).view(N, 2, N),
    ),
    "expanded second": (EXACT, lambda h: h[:, None].expand(N, N, N).sum(1)),
    "expanded first": (REFUSED, lambda h: h[None].expand(N, N, N)),
    "expanded first, summed": (EXACT, lambda h: h[None].expand(N, N, N).sum(0)),
    "one sample broadcast": (REFUSED, lambda h: h * h[:1]),
    "last sample broadcast by expand": (REFUSED, lambda h: h * h[-1].expand(N, N)),
    "sums along features, broadcast wrongly": (REFUSED, lambda h: h + h.sum(1)),
    "norms without keepdim": (REFUSED, lambda h: h / h.norm(dim=1)),
    "norms with keepdim": (EXACT, lambda h: h / h.norm(dim=1, keepdim=True)),
    "as_strided transposes": (REFUSED, lambda h: h.as_strided((N, N), (1, N))),
    "as_strided overlaps": (REFUSED, lambda h: h.as_strided((3, 8), (4, 1))),
    "as_strided repeats one row": (REFUSED, lambda h: h.as_strided((N, N), (0, 1)) * h),
    "movedim there and back": (EXACT, lambda h: h.movedim(0, 1).relu().movedim(1, 0)),
    "narrow and shifted": (REFUSED, lambda h: h[1:] * h[:-1]),
    "every second sample": (REFUSED, lambda h: h[::2] * h[1::2]),
    "negative steps by index": (REFUSED, lambda h: h * h[torch.arange(N - 1, -1, -1)]),
    "ellipsis and None": (EXACT, lambda h: h[..., None, :].squeeze(1)),
    "diagonal": (EITHER, lambda h: h.diagonal().square()),
    "tril": (EITHER, lambda h: h.tril()),
    "tril of the transpose": (REFUSED, lambda h: h.T.tril()),
    "diag_embed": (EXACT, lambda h: torch.diag_embed(h)),
    "diag of one column": (EITHER, lambda h: torch.diag(h[:, 0])),
    "trace": (REFUSED, lambda h: h * h.trace()),
    "block_diag": (EITHER, lambda h: torch.block_diag(*h.split(1)).T),
    "meshgrid": (REFUSED, lambda h: torch.meshgrid(h[:, 0], h[:, 1], indexing="ij")[1]),
    "meshgrid xy": (REFUSED, lambda h: torch.meshgrid(h[:, 0], h[:, 1], indexing="xy")[0]),
    "cartesian_prod": (REFUSED, lambda h: torch.cartesian_prod(h[:, 0], h[:, 1])),
    "combinations": (REFUSED, lambda h: torch.combinations(h[:, 0])),
    "outer of two columns": (REFUSED, lambda h: torch.outer(h[:, 0], h[:, 1])),
    "column minus row": (REFUSED, lambda h: h[:, :1] - h[:, 1]),
    "pixel_shuffle, unbatched": (REFUSED, lambda h: F.pixel_shuffle(h.view(N, 2, 2), 2)[0]),
    "channel_shuffle over samples": (
        REFUSED,
        lambda h: F.channel_shuffle(h[None], 2)[0] * h,
    ),
    "view as complex and back": (
        EXACT,
        lambda h: torch.view_as_real(torch.view_as_complex(h.view(N, 2, 2)) ** 2),
    ),
    "unflatten the samples": (EXACT, lambda h: h.unflatten(0, (2, 2)).flatten(0, 1)),
    "squeeze of a sample axis of one": (REFUSED, lambda h: h[:1].squeeze(0) * h),
}


PAIRS: Table = {
    "pairwise differences": (REFUSED, lambda h, g: h[:, None] - g[None]),
    "similarities": (REFUSED, lambda h, g: h @ g.T),
    "similarities, diagonal": (EITHER, lambda h, g: (h @ g.T).diagonal()),
    "h @ g of square batches": (REFUSED, lambda h, g: h @ g),
    "mm of transposes": (REFUSED, lambda h, g: torch.mm(h.T, g.T)),
    "addmm": (REFUSED, lambda h, g: torch.addmm(h, g, h)),
    "cdist": (REFUSED, lambda h, g: torch.cdist(h, g)),
    "pairwise_distance": (EXACT, lambda h, g: F.pairwise_distance(h, g)),
    "cosine per sample": (EXACT, lambda h, g: F.cosine_similarity(h, g)),
    "cosine over samples": (REFUSED, lambda h, g: F.cosine_similarity(h, g, dim=0)),
    "cosine of all pairs": (REFUSED, lambda h, g: F.cosine_similarity(h[:, None], g, dim=-1)),
    "cosine, rolled": (REFUSED, lambda h, g: F.cosine_similarity(h, g.roll(1, 0))),
    "linear with samples as weight": (REFUSED, lambda h, g: F.linear(h, g)),
    "linear with samples as bias": (REFUSED, lambda h, g: F.linear(h, torch.eye(N).double(), g[0])),
    "linear with a column as bias": (
        REFUSED,
        lambda h, g: F.linear(h, torch.eye(N).double(), g[:, 0]),
    ),
    "layer norm with samples as weight": (REFUSED, lambda h, g: F.layer_norm(h, (N,), g[:, 0])),
    "prelu with samples as weight": (REFUSED, lambda h, g: F.prelu(h, g[:, 0])),
    "conv with samples as weight": (
        REFUSED,
        lambda h, g: F.conv1d(h[:, :, None], g[:, :, None]).squeeze(2),
    ),
    "batch norm with samples as mean": (
        REFUSED,
        lambda h, g: F.batch_norm(h, h[:, 0].detach() * 0, g[:, 0].detach() * 0 + 1, g[0]),
    ),
    "embedding of samples": (REFUSED, lambda h, g: F.embedding(torch.tensor([1, 0, 3, 2]), h) * g),
    "lerp by a column": (REFUSED, lambda h, g: torch.lerp(h, g, g[:, 0])),
    "clamp by a column": (REFUSED, lambda h, g: h.clamp(min=g[:, 0])),
    "where by a column": (REFUSED, lambda h, g: torch.where(h > 0, h, g[:, 0])),
    "where by a mask of a column": (EITHER, lambda h, g: torch.where(g[:, 0] > 0, h, g)),
    "where takes another sample": (REFUSED, lambda h, g: torch.where(h > 0, h, g.flip(0))),
    "where": (EXACT, lambda h, g: torch.where(h > 0, h, g)),
    "maximum with the transpose": (REFUSED, lambda h, g: torch.maximum(h, g.T)),
    "addcmul with a column": (REFUSED, lambda h, g: torch.addcmul(h, g, g[:, 0])),
    "addr": (REFUSED, lambda h, g: torch.addr(h, g[:, 0], g[:, 1])),
    "ger of a column and a constant": (EXACT, lambda h, g: torch.outer(h[:, 0], rand(N))),
    "ger of a constant and a column": (REFUSED, lambda h, g: torch.outer(rand(N), h[:, 0])),
    "mv": (REFUSED, lambda h, g: torch.mv(h, g[:, 0])),
    "dot": (REFUSED, lambda h, g: h * torch.dot(h[:, 0], g[:, 0])),
    "kron": (REFUSED, lambda h, g: torch.kron(h, g)[:N]),
    "vecdot": (EXACT, lambda h, g: torch.linalg.vecdot(h, g)),
    "vecdot over samples": (REFUSED, lambda h, g: torch.linalg.vecdot(h, g, dim=0)),
    "inner": (REFUSED, lambda h, g: torch.inner(h, g)),
    "multi_dot": (REFUSED, lambda h, g: torch.linalg.multi_dot([h, g, h])),
    "hypernetwork": (EXACT, lambda h, g: torch.einsum("bi,bj,bj->bi", h, g, g)),
    "hypernetwork by group convolution": (
        EITHER,
        lambda h, g: F.conv1d(h.view(1, N * N, 1), g.reshape(N * N, 1, 1), groups=N * N).view(N, N),
    ),
    "group convolution, one group too few": (
        REFUSED,
        lambda h, g: F.conv1d(h.view(1, N * N, 1), g.view(2, 8, 1), groups=2).view(2, 1),
    ),
    "stack on the wrong axis": (REFUSED, lambda h, g: torch.stack([h, g]).view(N, 2 * N)),
    "cat on features": (EXACT, lambda h, g: torch.cat([h, g], 1)),
    "cat on samples and chunk": (
        EXACT,
        lambda h, g: F.pairwise_distance(*torch.cat([h, g]).relu().chunk(2)),
    ),
    "cat on samples, softmax, chunk": (
        REFUSED,
        lambda h, g: torch.cat([h, g]).softmax(0).chunk(2)[0],
    ),
    "cat on samples, taken with a stride": (REFUSED, lambda h, g: h * torch.cat([h, g])[::2]),
    "cat on samples, interleaved view": (
        REFUSED,
        lambda h, g: torch.cat([h, g]).view(N, 2, N).prod(1),
    ),
    "vstack and dsplit": (EITHER, lambda h, g: torch.dstack(torch.vstack([h, g]).chunk(2))[0]),
    "broadcast_tensors": (REFUSED, lambda h, g: torch.broadcast_tensors(h[:, None], g)[1]),
    "searchsorted among samples": (
        EITHER,
        lambda h, g: h * torch.searchsorted(g.detach().sort(0)[0].T.contiguous(), h.detach()),
    ),
}


def cases() -> Iterator[Case]:
    """All of this file."""
    return chain(on_hidden("reshape", RESHAPES), on_pair("pair", PAIRS))
