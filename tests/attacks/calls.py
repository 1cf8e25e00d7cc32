"""Attacks by the form of a call: keywords, aliases of axes, arguments by position."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from .base import (
    EITHER,
    EXACT,
    RECENT,
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

EVERY = torch.arange(N)
EYE = torch.eye(N, dtype=torch.float64)


LABELS = torch.tensor([3, 0, 1, 0])


FORMS: Table = {
    "sum(axis=0)": (REFUSED, lambda h: h * h.sum(axis=0)),
    "sum(axis=1), kept": (EXACT, lambda h: h * h.sum(axis=1, keepdims=True)),
    "mean(dim=(-2,))": (REFUSED, lambda h: h * torch.mean(input=h, dim=(-2,))),
    "sum of every axis by an empty tuple": (REFUSED, lambda h: h * h.sum(dim=())),
    "std(True) is no axis": (REFUSED, lambda h: h / h.std(True)),
    "var(False) is no axis": (REFUSED, lambda h: h / h.var(False)),
    "torch.std(h, True)": (REFUSED, lambda h: h / torch.std(h, True)),
    "var_mean(h, True)": (REFUSED, lambda h: h - torch.var_mean(h, True)[1]),
    "std(1)": (EXACT, lambda h: h / h.std(1, keepdim=True)),
    "std(1, True)": (EXACT, lambda h: h / h.std(1, True)[:, None]),
    "norm(1) is no axis": (REFUSED, lambda h: h / h.norm(1)),
    "torch.norm(h, 1)": (REFUSED, lambda h: h / torch.norm(h, 1)),
    "norm(2, 1, True)": (EXACT, lambda h: h / h.norm(2, 1, True)),
    "norm(1, 0)": (REFUSED, lambda h: h / h.norm(1, 0)),
    "linalg.norm(h, 1) is a matrix norm": (REFUSED, lambda h: h / torch.linalg.norm(h, 1)),
    "linalg.vector_norm(h, 1)": (REFUSED, lambda h: h / torch.linalg.vector_norm(h, 1)),
    "linalg.matrix_norm": (REFUSED, lambda h: h / torch.linalg.matrix_norm(h)),
    "nuclear norm": (REFUSED, lambda h: h / torch.linalg.norm(h, "nuc")),
    "normalize(h, 1, 0)": (REFUSED, lambda h: F.normalize(h, 1, 0)),
    "normalize(h, 1, 1)": (EXACT, lambda h: F.normalize(h, 1, 1)),
    "logsumexp((0, 1))": (REFUSED, lambda h: h - h.logsumexp((0, 1))),
    "max of a tuple": (REFUSED, lambda h: h / h.amax(dim=(0, 1))),
    "aminmax": (REFUSED, lambda h: h - torch.aminmax(h).min),
    "aminmax(dim=1)": (
        EXACT,
        lambda h: h - torch.aminmax(h if RECENT else h.detach(), dim=1, keepdim=True).min,
    ),
    "nanmean": (REFUSED, lambda h: h - h.nanmean()),
    "nansum(0)": (REFUSED, lambda h: h - h.nansum(0)),
    "mode(0)": (REFUSED, lambda h: h - h.mode(0)[0]),
    "nanquantile": (REFUSED, lambda h: h - h.nanquantile(0.3)),
    "dist": (REFUSED, lambda h: h * h.dist(h * 2)),
    "permute(dims=)": (REFUSED, lambda h: torch.permute(h, dims=(1, 0))),
    "transpose by keywords": (REFUSED, lambda h: torch.transpose(input=h, dim0=-1, dim1=-2)),
    "moveaxis": (REFUSED, lambda h: torch.moveaxis(h, 0, 1)),
    "moveaxis, negative and back": (EXACT, lambda h: torch.moveaxis(h.movedim(-1, -2), 0, -1)),
    "reshape by keyword": (REFUSED, lambda h: torch.reshape(h.T, shape=(-1, N))),
    "view(size)": (EXACT, lambda h: h.view(torch.Size((N, 2, 2)))),
    "reshape_as a transpose": (REFUSED, lambda h: h.T.reshape_as(h)),
    "ravel and unflatten": (EXACT, lambda h: h.ravel().unflatten(0, (-1, N))),
    "ravel of the transpose": (REFUSED, lambda h: h.T.ravel().unflatten(0, (-1, N))),
    "roll of both": (REFUSED, lambda h: h * torch.roll(h, (0, 1), (1, 0))),
    "roll, dims=-2": (REFUSED, lambda h: h * torch.roll(h, shifts=1, dims=-2)),
    "roll, shifts that cancel": (EITHER, lambda h: h * torch.roll(h, (1, -1), (0, 0))),
    "flip, dims=(-2,)": (REFUSED, lambda h: h * torch.flip(h, dims=(-2,))),
    "index_select, dim=-2": (REFUSED, lambda h: h * torch.index_select(h, -2, EVERY.flip(0))),
    "concat, keyword": (REFUSED, lambda h: torch.concat(tensors=(h, h.T), dim=-1)),
    "stack, dim=-2": (REFUSED, lambda h: torch.stack(h.unbind(1), dim=-2)),
    "tensor_split, dim=-2": (REFUSED, lambda h: torch.mul(*torch.tensor_split(h, 2, dim=-2))),
    "matmul of a constant, reversed": (REFUSED, lambda h: h.__rmatmul__(rand(N, N))),
    "matmul by keyword": (REFUSED, lambda h: torch.matmul(other=h, input=rand(N, N))),
    "matmul of a vector": (REFUSED, lambda h: h * torch.matmul(rand(N), h)),
    "vector on the right": (EXACT, lambda h: h * torch.matmul(h, rand(N))[:, None]),
    "vector on the right, broadcast wrongly": (REFUSED, lambda h: h * torch.matmul(h, rand(N))),
    "reversed operators": (EXACT, lambda h: (1 - h) * (2**h) / (3 / (h * h + 1))),
    "numpy scalar": (EXACT, lambda h: np.float64(2) * h + h * np.float64(3)),
    "sort, descending by position": (REFUSED, lambda h: h.sort(0, True)[0]),
    "argsort and gather wrongly": (REFUSED, lambda h: h.gather(0, h.argsort(1))),
    "squeeze of no axis": (EXACT, lambda h: h.squeeze()),
    "flatten(0)": (REFUSED, lambda h: h.flatten(0).cumsum(0).view(N, N)),
    "flatten(-2)": (REFUSED, lambda h: h.flatten(-2).softmax(-1).view(N, N)),
    "unsqueeze(-3)": (REFUSED, lambda h: h.unsqueeze(-3).softmax(-2).squeeze(-3)),
    "swapdims": (REFUSED, lambda h: torch.swapdims(h, 0, 1)),
    "atleast_3d": (EXACT, lambda h: torch.atleast_3d(h)),
    "expand_as, other way": (REFUSED, lambda h: h[:, 0].expand_as(h)),
    "broadcast_to": (REFUSED, lambda h: torch.broadcast_to(h[:, 0], (N, N))),
    "column_stack": (EXACT, lambda h: torch.column_stack([h[:, 0], h[:, 1]])),
    "row_stack": (REFUSED, lambda h: torch.vstack([h[:, 0], h[:, 1]])),
    "H": (REFUSED, lambda h: h.H),
    "unfold, dimension=-2": (REFUSED, lambda h: h.unfold(-2, 2, 1)),
    "cumulative_trapezoid": (REFUSED, lambda h: torch.cumulative_trapezoid(h, dim=0)),
    "scatter by keyword": (
        REFUSED,
        lambda h: (
            h * torch.zeros_like(h).scatter(dim=0, index=EVERY.flip(0)[:, None].expand(N, N), src=h)
        ),
    ),
    "einsum, spaces and capitals": (REFUSED, lambda h: torch.einsum(" B i , i B -> B ", h, h)),
    "einsum, list of operands": (REFUSED, lambda h: torch.einsum("ab,cb->ac", [h, h])),
    "einsum, a letter summed": (EXACT, lambda h: torch.einsum("ab,ac->a", h, h)),
    "layer_norm by keyword": (EXACT, lambda h: F.layer_norm(input=h, normalized_shape=[N])),
    "softmax with dtype": (REFUSED, lambda h: torch.softmax(h, 0, dtype=torch.float64)),
    "clamp by tensors": (EXACT, lambda h: torch.clamp(h, max=rand(N).abs())),
    "pad by nothing": (EXACT, lambda h: F.pad(h, ())),
    "pad, replicate over samples": (
        REFUSED,
        lambda h: F.pad(h.T[None], (1, 1), "replicate")[0].T[:N] * h,
    ),
    "searched axis": (REFUSED, lambda h: h.select(-2, 1) * h),
    "narrow_copy": (REFUSED, lambda h: torch.narrow(h, 0, 1, 3) * torch.narrow(h, 0, 0, 3)),
    "take one column with keepdim": (EXACT, lambda h: h.narrow(-1, 1, 1)),
    "renorm by keyword": (REFUSED, lambda h: torch.renorm(h, p=2, dim=-1, maxnorm=0.1)),
    "sparse aggregation": (REFUSED, lambda h: torch.sparse.mm(rand(N, N).relu().to_sparse(), h)),
    "adjacency": (REFUSED, lambda h: (rand(N, N) > 0).double() @ h),
    "edges": (REFUSED, lambda h: torch.zeros_like(h).index_add(0, LABELS, h[EVERY])),
    "nested tensor": (
        EITHER,
        lambda h: torch.nested.to_padded_tensor(torch.nested.as_nested_tensor(list(h)), 0.0),
    ),
    "chain of views": (
        EXACT,
        lambda h: (
            h.view(2, 2, 2, 2).permute(3, 0, 1, 2).reshape(2, N, 2).permute(1, 2, 0).reshape(N, N)
        ),
    ),
    "chain of views, one step off": (
        REFUSED,
        lambda h: (
            h.view(2, 2, 2, 2).permute(3, 0, 2, 1).reshape(2, N, 2).permute(1, 2, 0).reshape(N, N)
        ),
    ),
    "odd and even samples exchanged": (
        REFUSED,
        lambda h: h * h.view(2, 2, N).flip(1).reshape(N, N),
    ),
    "blocks of samples exchanged": (REFUSED, lambda h: h * h.view(2, 2, N)[[1, 0]].reshape(N, N)),
}


KEYWORDS: Table = {
    "linear": (EXACT, lambda m, x: F.linear(bias=m.b, weight=m.w, input=x)),
    "linear, samples as weight": (REFUSED, lambda m, x: F.linear(weight=m.l(x), input=m.w)),
    "conv1d": (EXACT, lambda m, x: F.conv1d(weight=m.w[:, None, :2], input=x[:, None])),
    "mm": (EXACT, lambda m, x: torch.mm(mat2=m.w, input=x)),
    "mm, other way": (REFUSED, lambda m, x: torch.mm(mat2=m.l(x), input=m.w)),
    "add with alpha": (EXACT, lambda m, x: torch.add(input=x, other=m.b, alpha=3)),
    "sub with alpha, parameter first": (EXACT, lambda m, x: torch.sub(m.b, x, alpha=2)),
    "rsub": (EXACT, lambda m, x: torch.rsub(x, m.b)),
    "addmm with beta": (EXACT, lambda m, x: torch.addmm(m.b, x, m.w, beta=2, alpha=3)),
    "addcdiv": (EXACT, lambda m, x: torch.addcdiv(x, m.b, m.b.exp(), value=2)),
    "lerp": (EXACT, lambda m, x: torch.lerp(input=x, end=m.b, weight=0.3)),
    "embedding": (EXACT, lambda m, x: F.embedding(weight=m.w, input=x.argmax(1))),
    "embedding with a padding": (EXACT, lambda m, x: F.embedding(x.argmax(1), m.w, padding_idx=-2)),
    "layer_norm": (EXACT, lambda m, x: F.layer_norm(x, (N,), bias=m.b, weight=m.w[0])),
    "batch_norm, eval": (
        EXACT,
        lambda m, x: F.batch_norm(
            x, running_var=torch.ones(N).double(), running_mean=m.b.detach(), weight=m.b
        ),
    ),
    "prelu": (EXACT, lambda m, x: F.prelu(input=x, weight=m.b)),
    "bilinear": (EXACT, lambda m, x: F.bilinear(x, x, weight=m.w[None], bias=m.b[:1])),
    "mha": (
        EXACT,
        lambda m, x: F.multi_head_attention_forward(
            x[None].transpose(0, 1).transpose(0, 1),
            x[None],
            x[None],
            N,
            1,
            m.w.repeat(3, 1),
            m.b.repeat(3),
            None,
            None,
            False,
            0.0,
            m.w,
            m.b,
        )[0][0],
    ),
    "embedding_bag with offsets": (
        EITHER,
        lambda m, x: F.embedding_bag(
            x.argsort(1).flatten(), m.w, torch.arange(0, N * len(x), N), mode="sum"
        ),
    ),
    "embedding_bag with offsets across samples": (
        EITHER,
        lambda m, x: F.embedding_bag(
            x.argsort(1).flatten(), m.w, torch.tensor([0, 3, 9, 12]), mode="mean"
        ),
    ),
    "embedding_bag with weights": (
        EITHER,
        lambda m, x: F.embedding_bag(x.argsort(1), m.w, per_sample_weights=m.l(x), mode="sum"),
    ),
    "embedding_bag with weights of others": (
        REFUSED,
        lambda m, x: F.embedding_bag(
            x.argsort(1), m.w, per_sample_weights=m.l(x) * m.l(x).flip(0), mode="sum"
        ),
    ),
    "grid_sample": (
        EXACT,
        lambda m, x: F.grid_sample(
            x.view(-1, 1, 2, 2),
            F.affine_grid(
                m.w[None, :2, :3].expand(len(x), 2, 3), (len(x), 1, 2, 2), align_corners=False
            ),
            align_corners=False,
        ),
    ),
    "a parameter as image, a grid per sample": (
        EXACT,
        lambda m, x: F.grid_sample(
            m.w[None, None].expand(len(x), 1, N, N),
            m.l(x).tanh().view(-1, 1, 2, 2),
            align_corners=False,
        ),
    ),
    "grids of others": (
        REFUSED,
        lambda m, x: F.grid_sample(
            m.l(x).view(-1, 1, 2, 2), m.l(x).tanh().flip(0).view(-1, 1, 2, 2), align_corners=False
        ),
    ),
}


PRODUCTS: Table = {
    "multi_dot": (EXACT, lambda m, x: torch.linalg.multi_dot([m.l(x), m.w, m.w.T])),
    "multi_dot, samples inside": (REFUSED, lambda m, x: torch.linalg.multi_dot([m.w, m.l(x), m.w])),
    "multi_dot, samples last": (EXACT, lambda m, x: torch.linalg.multi_dot([m.w, m.w, m.l(x).T]).T),
    "solve, a right side each": (EXACT, lambda m, x: torch.linalg.solve(m.w + 9 * EYE, m.l(x).T).T),
    "solve, samples as rows": (REFUSED, lambda m, x: torch.linalg.solve(m.w + 9 * EYE, m.l(x))),
    "solve from the right": (
        EXACT,
        lambda m, x: torch.linalg.solve(m.w + 9 * EYE, m.l(x), left=False),
    ),
    "pad_sequence": (EXACT, lambda m, x: m.l(padded(x))),
    "pad_sequence, reversed": (REFUSED, lambda m, x: m.l(padded(x.flip(0))) * m.l(x)[:, None]),
    "pad_sequence, left, of ones": (
        EXACT,
        lambda m, x: padded(m.l(x), padding_value=1.0, padding_side="left"),
    ),
    "another dtype": (EXACT, lambda m, x: m.l(reread(x)[:, 1::2])),
    "another dtype, samples last": (
        EITHER,
        lambda m, x: m.l(reread(x.T.contiguous()).T[1::2]),
    ),
    "no features": (EXACT, lambda m, x: m.l(x) + x[:, :0] @ m.e),
}


def reread(x: Tensor) -> Tensor:
    """The bits as other numbers: two for each."""
    return x.view(dtype=torch.float32).nan_to_num().clamp(-1, 1).double()


def padded(x: Tensor, **options: Any) -> Tensor:
    """Sequences of one to three steps, one per sample."""
    steps = [
        row.expand(k % 3 + 1, N) * torch.arange(1, k % 3 + 2)[:, None] for k, row in enumerate(x)
    ]
    return pad_sequence(steps, batch_first=True, **options)


PAIRS: Table = {
    "max of two tensors": (EXACT, lambda h, g: h.max(g)),
    "max of two tensors, crossed": (REFUSED, lambda h, g: torch.max(h, g.T)),
    "where by position": (REFUSED, lambda h, g: h.where(h > g, g.flip(0))),
    "atan2": (EXACT, lambda h, g: torch.atan2(input=h, other=g)),
    "hypot, crossed": (REFUSED, lambda h, g: torch.hypot(h, g.roll(1, 0))),
    "cat of a column": (EXACT, lambda h, g: torch.cat((h, g[:, :1]), dim=-1)),
    "cat of a transposed column": (REFUSED, lambda h, g: torch.cat((h, g[:1].T), dim=-1)),
    "solve": (REFUSED, lambda h, g: torch.linalg.solve(h, g)),
    "lstsq": (REFUSED, lambda h, g: torch.linalg.lstsq(h, g).solution),
    "einsum outer": (EXACT, lambda h, g: torch.einsum("bi,bj->bij", h, g)),
    "einsum outer, order of outputs": (REFUSED, lambda h, g: torch.einsum("bi,bj->ibj", h, g)),
    "einsum outer of samples": (REFUSED, lambda h, g: torch.einsum("ai,bi->ab", h, g)),
    "einsum implicit": (REFUSED, lambda h, g: torch.einsum("bi,ij", h, g)),
    "einsum broadcast by an ellipsis": (
        REFUSED,
        lambda h, g: torch.einsum("...i,j...->...ij", h, g),
    ),
    "bmm of outer products": (EXACT, lambda h, g: torch.bmm(h[:, :, None], g[:, None])),
    "bmm across": (REFUSED, lambda h, g: torch.bmm(h[None], g[None])[0]),
    "baddbmm across": (REFUSED, lambda h, g: torch.baddbmm(h[None], h[None], g.T[None])[0]),
    "matmul broadcast across": (REFUSED, lambda h, g: (h[:, None] @ g[None]).squeeze(1)),
    "matmul per sample": (EXACT, lambda h, g: (h[:, None] @ g[:, :, None]).flatten(1)),
    "inplace of an alias of the other": (EXACT, lambda h, g: (h * 1).mul_(g.view(N, N))),
    "foreach": (EITHER, lambda h, g: torch.stack(torch._foreach_mul([h, g], 2.0)).sum(0)),
    "chain": (EXACT, lambda h, g: torch.addcmul(h, g, h).lerp(g, 0.5)),
    "scan by python": (EXACT, lambda h, g: sum(h[:, i : i + 1] * g.roll(i, 1) for i in range(N))),
    "scan by python, samples": (
        REFUSED,
        lambda h, g: sum(h[:, i : i + 1] * g.roll(i, 0) for i in range(N)),
    ),
}


def cases() -> Iterator[Case]:
    """All of this file."""
    parts = {"l": lin(), "w": 0.8 * rand(N, N, seed=6), "b": rand(N, seed=2)}
    return chain(
        on_hidden("form", FORMS),
        on_pair("form of two", PAIRS),
        on_module("keyword", KEYWORDS, rand(N, N), **parts),
        on_module("product", PRODUCTS, rand(N, N), w=rand(N, N), e=rand(0, N), l=lin()),
    )
