"""Attacks on the axis of the samples: operators over it, reshapes, transposes, contractions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from .attacks_base import EITHER, EXACT, REFUSED, Case, N, Table, case, lin, on_hidden, on_pair, rand


def attend(q: Tensor) -> Tensor:
    """Attention of q with itself over its last axis but one."""
    return (q @ q.transpose(-1, -2)).softmax(-1) @ q


OVER_SAMPLES: Table = {
    "pad shifts the samples": (EITHER, lambda h: F.pad(h, (0, 0, 1, -1))),
    "pad shifts the samples, residual": (REFUSED, lambda h: h + F.pad(h, (0, 0, 1, -1))),
    "pad and cut back": (EITHER, lambda h: F.pad(h, (0, 0, 0, 2))[:N]),
    "pad in front and cut wrong": (REFUSED, lambda h: h + F.pad(h, (0, 0, 2, 0))[:N]),
    "circular pad and pool": (
        REFUSED,
        lambda h: F.avg_pool1d(F.pad(h.T[None], (1, 1), mode="circular"), 3, 1)[0].T,
    ),
    "attention over samples": (REFUSED, attend),
    "sdpa over samples": (REFUSED, lambda h: F.scaled_dot_product_attention(*[h[None]] * 3)[0]),
    "layer norm over samples": (REFUSED, lambda h: F.layer_norm(h.T, (N,)).T),
    "layer norm over the batch": (REFUSED, lambda h: F.layer_norm(h, (N, N))),
    "layer norm per sample": (EXACT, lambda h: F.layer_norm(h, (N,))),
    "softmax 0": (REFUSED, lambda h: h.softmax(0)),
    "softmax 1": (EXACT, lambda h: h.softmax(1)),
    "softmax of the transpose": (REFUSED, lambda h: h.T.softmax(1).T),
    "log_softmax -2": (REFUSED, lambda h: F.log_softmax(h, -2)),
    "softmax of the flat batch": (REFUSED, lambda h: h.flatten().softmax(0).view(N, N)),
    "cumsum 0": (REFUSED, lambda h: h.cumsum(0)),
    "cumsum 1": (EXACT, lambda h: h.cumsum(1)),
    "cumprod 0": (REFUSED, lambda h: h.cumprod(0)),
    "logcumsumexp 0": (REFUSED, lambda h: h.logcumsumexp(0)),
    "cummax 0": (REFUSED, lambda h: h.cummax(0)[0]),
    "sort 0": (REFUSED, lambda h: h.sort(0)[0]),
    "sort 1": (EXACT, lambda h: h.sort(1)[0]),
    "msort": (REFUSED, lambda h: torch.msort(h)),
    "sort default axis of the transpose": (REFUSED, lambda h: h.T.sort()[0].T),
    "topk over samples": (REFUSED, lambda h: h.topk(N, 0)[0]),
    "kthvalue over samples": (REFUSED, lambda h: h - h.kthvalue(2, 0)[0]),
    "median of everything": (REFUSED, lambda h: h - h.median()),
    "quantile over samples": (REFUSED, lambda h: h - h.quantile(0.5, 0)),
    "max over samples": (REFUSED, lambda h: h - h.max(0)[0]),
    "amax over samples, kept": (REFUSED, lambda h: h / h.amax(0, keepdim=True)),
    "roll": (EITHER, lambda h: h.roll(1, 0)),
    "roll, residual": (REFUSED, lambda h: h * h.roll(1, 0)),
    "roll by n is the identity": (EITHER, lambda h: h * h.roll(N, 0)),
    "roll of the flat tensor by one sample": (REFUSED, lambda h: h * h.roll(N)),
    "roll of the flat tensor by one entry": (REFUSED, lambda h: h.roll(1)),
    "roll of features": (EXACT, lambda h: h * h.roll(1, 1)),
    "flip, residual": (REFUSED, lambda h: h * h.flip(0)),
    "flip of both axes, residual": (REFUSED, lambda h: h * h.flip(0, 1)),
    "flip twice": (EITHER, lambda h: h * h.flip(0).flip(0)),
    "flipud, residual": (REFUSED, lambda h: h * torch.flipud(h)),
    "fliplr, residual": (EXACT, lambda h: h * torch.fliplr(h)),
    "rot90": (REFUSED, lambda h: torch.rot90(h)),
    "rot90 four times": (EITHER, lambda h: torch.rot90(h, 4)),
    "diff over samples": (REFUSED, lambda h: torch.diff(h, dim=0, prepend=h[:1])),
    "gradient over samples": (REFUSED, lambda h: torch.gradient(h, dim=0)[0]),
    "fft over samples": (REFUSED, lambda h: torch.fft.fft(h, dim=0).abs()),
    "fft over features": (EXACT, lambda h: torch.fft.fft(h).real),
    "fft2 of the batch": (REFUSED, lambda h: torch.fft.fft2(h).real),
    "fftn default axes": (REFUSED, lambda h: torch.fft.fftn(h).real),
    "norm of the batch": (REFUSED, lambda h: h / h.norm()),
    "normalize over samples": (REFUSED, lambda h: F.normalize(h, dim=0)),
    "normalize per sample": (EXACT, lambda h: F.normalize(h)),
    "renorm per sample": (EITHER, lambda h: h.renorm(2, 0, 0.5)),
    "renorm per feature": (REFUSED, lambda h: h.renorm(2, 1, 0.5)),
    "minus mean of samples": (REFUSED, lambda h: h - h.mean(0)),
    "minus mean of everything": (REFUSED, lambda h: h - h.mean()),
    "minus detached mean": (EITHER, lambda h: h * h.mean(0).detach()),
    "minus mean under no_grad": (EITHER, lambda h: h * no_grad_mean(h)),
    "std of everything": (REFUSED, lambda h: h / h.std()),
    "var_mean over samples": (REFUSED, lambda h: h - torch.var_mean(h, 0)[1]),
    "item of another sample": (EITHER, lambda h: h * h[0, 0].item()),
    "cov": (REFUSED, lambda h: torch.cov(h)),
    "corrcoef of the transpose": (REFUSED, lambda h: torch.corrcoef(h.T)),
    "windows over samples": (REFUSED, lambda h: h.unfold(0, 2, 1).sum((1, 2))),
    "inverse of the (n, n) batch": (REFUSED, lambda h: torch.linalg.inv(h)),
    "matrix_exp of the (n, n) batch": (REFUSED, lambda h: torch.matrix_exp(h)),
    "det of the (n, n) batch": (REFUSED, lambda h: h * torch.linalg.det(h)),
    "matrix power of the batch": (REFUSED, lambda h: torch.linalg.matrix_power(h, 2)),
    "qr of the batch": (REFUSED, lambda h: torch.linalg.qr(h)[0]),
    "svd values of the batch": (REFUSED, lambda h: h * torch.linalg.svdvals(h)),
    "interpolate over samples": (
        REFUSED,
        lambda h: F.interpolate(h.T[None], size=N - 1, mode="linear")[0].T,
    ),
    "nearest interpolate over samples": (
        EITHER,
        lambda h: F.interpolate(h.T[None], size=2 * N)[0].T,
    ),
    "max_pool over samples": (REFUSED, lambda h: F.max_pool1d(h.T[None], 3, 1, 1)[0].T),
    "max_pool over features, unbatched": (EXACT, lambda h: F.max_pool1d(h, 2)),
    "adaptive pool over samples": (REFUSED, lambda h: F.adaptive_avg_pool1d(h.T, 2).T),
    "local response norm over samples": (REFUSED, lambda h: F.local_response_norm(h[None], 3)[0]),
    "trapezoid over samples": (REFUSED, lambda h: h - torch.trapezoid(h, dim=0)),
    "dropout by sample count": (EXACT, lambda h: F.dropout(h, 0.5, training=False)),
}


def no_grad_mean(h: Tensor) -> Tensor:
    """The mean over samples, outside the graph."""
    with torch.no_grad():
        return h.mean(0)


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

CUBES: Table = {
    "softmax without axis": (REFUSED, lambda h: F.softmax(h)),
    "log_softmax without axis": (REFUSED, lambda h: F.log_softmax(h)),
    "softmin without axis": (REFUSED, lambda h: F.softmin(h)),
    "attention over time": (EXACT, attend),
    "attention over samples": (REFUSED, lambda h: attend(h.transpose(0, 1)).transpose(0, 1)),
    "attention over samples, last axes": (REFUSED, lambda h: attend(h.permute(2, 0, 1))[0]),
    "time merged first, split wrongly": (
        REFUSED,
        lambda h: h.transpose(0, 1).reshape(N * N, N).view(N, N, N),
    ),
    "time merged first, split rightly": (
        EXACT,
        lambda h: h.transpose(0, 1).reshape(-1, N).view(N, N, N).transpose(0, 1),
    ),
    "merged and split": (EXACT, lambda h: h.reshape(-1, N).relu().view(N, N, N)),
    "merged, softmax": (REFUSED, lambda h: h.reshape(-1, N).softmax(0).view(N, N, N)),
    "features merged with samples": (
        EITHER,
        lambda h: h.permute(2, 0, 1).reshape(N * N, N)[:N],
    ),
    "time and samples merged, summed": (REFUSED, lambda h: h.reshape(N * N, N).view(2, -1).T),
    "a loss per time step": (REFUSED, lambda h: h.sum((0, 2))),
    "a loss per sample": (EXACT, lambda h: h.sum((1, 2))),
    "transposed samples and time": (REFUSED, lambda h: h.transpose(0, 1)),
    "first time step": (EXACT, lambda h: h[:, 0]),
    "first sample's steps": (EITHER, lambda h: h[0]),
    "diagonal of samples and time": (EITHER, lambda h: h.diagonal(dim1=0, dim2=1).T),
    "einsum diagonal": (EITHER, lambda h: torch.einsum("bbj->bj", h)),
    "einsum trace over samples": (REFUSED, lambda h: torch.einsum("bbj->j", h)),
    "einsum transposes": (REFUSED, lambda h: torch.einsum("bij->ibj", h)),
    "einsum implicit output order": (REFUSED, lambda h: torch.einsum("zij", h)),
    "einsum gram": (EXACT, lambda h: torch.einsum("bij,bik->bjk", h, h)),
    "einsum other samples": (REFUSED, lambda h: torch.einsum("bij,kij->bk", h, h)),
    "einsum contracted": (REFUSED, lambda h: torch.einsum("bij,bik->jk", h, h)),
    "einsum contracted by one side": (REFUSED, lambda h: torch.einsum("bij,ibj->bj", h, h)),
    "einsum ellipsis": (EXACT, lambda h: torch.einsum("...ij,...jk->...ik", h, h)),
    "einsum ellipsis in the middle": (REFUSED, lambda h: torch.einsum("i...j,j...k->i...k", h, h)),
    "einsum sublist format": (REFUSED, lambda h: torch.einsum(h, [0, 1, 2], [1, 0, 2])),
    "einsum of three": (EXACT, lambda h: torch.einsum("bij,bjk,bkl->bil", h, h, h)),
    "einsum of three, one crossed": (
        REFUSED,
        lambda h: torch.einsum("bij,bjk,lkb->bil", h, h, h),
    ),
    "bmm": (EXACT, lambda h: torch.bmm(h, h)),
    "bmm over time, samples as rows": (
        REFUSED,
        lambda h: torch.bmm(h.transpose(0, 1), h.permute(1, 2, 0)).transpose(0, 1),
    ),
    "bmm contracts samples": (REFUSED, lambda h: torch.bmm(h.permute(1, 2, 0), h.transpose(0, 1))),
    "matmul with broadcast samples": (REFUSED, lambda h: h @ h[0]),
    "matmul of a cube and its slice": (REFUSED, lambda h: h @ h[:, 0]),
    "matmul per sample vector": (EXACT, lambda h: (h @ h[:, 0, :, None]).squeeze(-1)),
    "matmul of a cube and a vector of samples": (REFUSED, lambda h: h @ h[:, 0, 0]),
    "tensordot over features": (REFUSED, lambda h: torch.tensordot(h, h, 1)[:, 0]),
    "tensordot over samples": (REFUSED, lambda h: torch.tensordot(h, h, ([0], [0]))[0]),
    "inverse per sample": (EXACT, lambda h: torch.linalg.inv(h)),
    "inverse per time step": (REFUSED, lambda h: torch.linalg.inv(h.transpose(0, 1))),
    "solve per sample": (EXACT, lambda h: torch.linalg.solve(h, h[:, :1].mT)),
    "solve, ambiguous right side": (REFUSED, lambda h: torch.linalg.solve(h, h[0])),
    "cdist per sample": (EXACT, lambda h: torch.cdist(h, h.flip(1))),
    "cdist broadcast": (REFUSED, lambda h: torch.cdist(h[:1], h.transpose(0, 1))),
    "sdpa per sample": (EXACT, lambda h: F.scaled_dot_product_attention(h, h, h)),
    "sdpa with heads in front": (
        REFUSED,
        lambda h: F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3).transpose(0, 1),
    ),
    "sdpa, samples as heads": (EXACT, lambda h: F.scaled_dot_product_attention(*[h[None]] * 3)[0]),
    "sdpa mask from samples": (
        REFUSED,
        lambda h: F.scaled_dot_product_attention(h, h, h, attn_mask=h[:, 0]),
    ),
    "glu over samples": (REFUSED, lambda h: F.glu(h, 0)),
    "glu": (EXACT, lambda h: F.glu(h)),
    "cumsum over time": (EXACT, lambda h: h.cumsum(1)),
    "cumsum over -3": (REFUSED, lambda h: h.cumsum(-3)),
    "std over samples and features": (REFUSED, lambda h: h / h.std((0, 2), keepdim=True)),
    "pixel_shuffle, channels are samples": (REFUSED, lambda h: F.pixel_shuffle(h, 2)[0]),
    "fold patches of a sample": (EXACT, lambda h: F.fold(h, (2, 2), (1, 1))),
    "unfold windows of time": (EXACT, lambda h: h.unfold(1, 2, 1)),
    "adaptive max pool, samples as channels": (EXACT, lambda h: F.adaptive_max_pool2d(h, 2)),
    "max_pool3d, unbatched": (REFUSED, lambda h: F.max_pool3d(h[None], 2)[0]),
    "batch norm, samples as channels": (
        REFUSED,
        lambda h: F.batch_norm(h.permute(1, 0, 2), None, None, training=True),
    ),
    "instance norm, samples as channels": (
        EITHER,
        lambda h: F.instance_norm(h[None])[0],
    ),
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


def threes() -> Iterator[Case]:
    """torch.cross without an axis takes the first of size three."""
    for name, dim, expectation in (("first axis of size 3", None, REFUSED), ("-1", -1, EXACT)):
        body = lambda m, x, dim=dim: torch.cross(m.l(x), m.k(x), dim=dim)
        yield case(
            f"cross: {name}", expectation, body, rand(3, 3), l=lin(3, 3), k=lin(3, 3, seed=9)
        )


def cases() -> Iterator[Case]:
    """All of this file."""
    return chain(
        on_hidden("axis", OVER_SAMPLES),
        on_hidden("reshape", RESHAPES),
        on_hidden("cube", CUBES, N, N, N),
        on_pair("pair", PAIRS),
        threes(),
    )
