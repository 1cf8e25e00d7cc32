"""Attacks by operators over the axis of the samples."""

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
    case,
    lin,
    on_hidden,
    rand,
)


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


def threes() -> Iterator[Case]:
    """torch.cross without an axis takes the first of size three."""
    for name, dim, expectation in (("first axis of size 3", None, REFUSED), ("-1", -1, EXACT)):
        body = lambda m, x, dim=dim: torch.cross(m.l(x), m.k(x), dim=dim)
        yield case(
            f"cross: {name}", expectation, body, rand(3, 3), l=lin(3, 3), k=lin(3, 3, seed=9)
        )


def cases() -> Iterator[Case]:
    """All of this file."""
    return chain(on_hidden("axis", OVER_SAMPLES), on_hidden("cube", CUBES, N, N, N), threes())
