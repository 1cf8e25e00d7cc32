"""Attacks by the way a parameter is used: derived, expanded, gathered, hidden."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Table,
    elsewhere,
    ints,
    lin,
    on_module,
    rand,
    unseen,
)

LABELS = ints(N, seed=3)


PIXELS = rand(1, N, 1, seed=8)
SQUARE: Table = {
    "transposed": (EXACT, lambda m, x: x @ m.w.t()),
    "F.linear of the transpose": (EXACT, lambda m, x: F.linear(x, m.w.T)),
    "from the left": (REFUSED, lambda m, x: m.w @ m.l(x)),
    "from the left of the raw input": (EITHER, lambda m, x: m.w @ x),
    "softmax of the parameter": (EXACT, lambda m, x: x @ m.w.softmax(0)),
    "product of two": (EXACT, lambda m, x: x @ (m.w @ m.l.weight)),
    "power of itself": (EXACT, lambda m, x: x @ m.w @ m.w @ m.w),
    "triangle": (EXACT, lambda m, x: x @ m.w.tril()),
    "inverse": (EXACT, lambda m, x: x @ torch.linalg.inv(m.w)),
    "solve": (EITHER, lambda m, x: torch.linalg.solve(m.w, x.T).T),
    "matrix_exp": (EXACT, lambda m, x: x @ torch.matrix_exp(m.w - m.w.T)),
    "expanded over samples": (EXACT, lambda m, x: x * m.w[0].expand(N, N)),
    "expanded and sliced": (EITHER, lambda m, x: x * m.w[0].expand(N, N)[: x.shape[0]]),
    "repeated over samples": (EXACT, lambda m, x: x + m.w[:1].repeat(x.shape[0], 1)),
    "a row per sample": (EITHER, lambda m, x: x + m.w),
    "a row per sample, times": (EITHER, lambda m, x: x * m.w * m.w.T),
    "a row per sample after a layer": (EITHER, lambda m, x: m.l(x) * m.w),
    "a number per sample": (EITHER, lambda m, x: x * m.w[:, :1]),
    "a number per feature": (EXACT, lambda m, x: x * m.w[:, 0]),
    "first rows": (EITHER, lambda m, x: x + m.w[: x.shape[0]]),
    "gathered by labels": (EXACT, lambda m, x: x + m.w[LABELS[: x.shape[0]]]),
    "gathered by data": (EXACT, lambda m, x: x * m.w[(x[:, 0] > 0).long()]),
    "gathered by argmax": (EXACT, lambda m, x: x * m.w[x.argmax(1)]),
    "gathered columns": (EXACT, lambda m, x: x * m.w[:, x.argmax(1)].T),
    "gathered by another sample": (EITHER, lambda m, x: x * m.w[x.argmax(1).flip(0)]),
    "embedding": (EXACT, lambda m, x: x * F.embedding(x.argmax(1), m.w)),
    "index_select": (EXACT, lambda m, x: x * m.w.index_select(0, x.argmax(1))),
    "gather": (EXACT, lambda m, x: x * m.w.gather(0, x.argsort(1))),
    "take_along_dim": (EXACT, lambda m, x: x * m.w[:1].take_along_dim(x.argsort(1), 1)),
    "one-hot matmul": (EXACT, lambda m, x: F.one_hot(x.argmax(1), N).double() @ m.w),
    "joined on samples, dropped": (EITHER, lambda m, x: torch.cat([m.w, m.l(x)])[N:]),
    "joined on samples, kept": (EITHER, lambda m, x: torch.cat([m.w[:1], m.l(x)])[: x.shape[0]]),
    "joined on samples, residual": (
        REFUSED,
        lambda m, x: torch.cat([m.w[:1], m.l(x)])[: x.shape[0]] * m.l(x),
    ),
    "joined on samples, attended": (
        REFUSED,
        lambda m, x: (lambda z: (z @ z.T).softmax(1) @ z)(torch.cat([m.w, m.l(x)]))[N:],
    ),
    "joined on features": (EXACT, lambda m, x: torch.cat([m.w[:1].expand_as(x), m.l(x)], 1)),
    "stacked in front": (EXACT, lambda m, x: torch.stack([m.w[0].expand_as(x), m.l(x)]).prod(0)),
    "as query over samples": (REFUSED, lambda m, x: x * (m.w[:1] @ m.l(x)).squeeze(0)),
    "prototypes": (EXACT, lambda m, x: torch.cdist(m.l(x), m.w)),
    "prototypes, other way": (REFUSED, lambda m, x: torch.cdist(m.w, m.l(x))),
    "prototypes by broadcasting": (EXACT, lambda m, x: (x[:, None] - m.w[None]).square().sum(-1)),
    "prototypes broadcast wrongly": (REFUSED, lambda m, x: (m.l(x)[None] - m.w[:, None]).prod(-1)),
    "normalised prototypes": (EXACT, lambda m, x: F.linear(F.normalize(x), F.normalize(m.w))),
    "clipped by its norm": (EXACT, lambda m, x: x @ (m.w / m.w.norm().clamp(min=1))),
    "scale by a norm": (EXACT, lambda m, x: m.l(x) * m.w.norm()),
    "row of a loop": (EXACT, lambda m, x: sum((x * m.w[i]).relu() for i in range(N))),
    "row per sample in a loop": (
        EITHER,
        lambda m, x: torch.stack([x[i] * m.w[i] for i in range(x.shape[0])]),
    ),
    "same row in a loop over samples": (
        EITHER,
        lambda m, x: torch.cat([x[i : i + 1] @ m.w for i in range(x.shape[0])]),
    ),
    "einsum own": (EITHER, lambda m, x: torch.einsum("bi,bj->bj", x, m.w)),
    "einsum bij": (EXACT, lambda m, x: torch.einsum("bi,ij->bj", x, m.w)),
    "einsum contracted": (REFUSED, lambda m, x: torch.einsum("ib,ij->bj", m.l(x), m.w)),
    "einsum transposed output": (EXACT, lambda m, x: torch.einsum("bi,ij->jb", x, m.w).T),
    "einsum transposed output, left so": (REFUSED, lambda m, x: torch.einsum("bi,ij->jb", x, m.w)),
    "einsum elementwise": (EITHER, lambda m, x: torch.einsum("bi,bi->bi", x, m.w)),
    "einsum to a number": (EITHER, lambda m, x: torch.einsum("bi,bi->b", x, m.w)),
    "einsum with a repeated letter": (EXACT, lambda m, x: torch.einsum("bi,ii->bi", x, m.w)),
    "bmm with an expanded weight": (
        EXACT,
        lambda m, x: torch.bmm(x[:, None], m.w.expand(x.shape[0], N, N)).squeeze(1),
    ),
    "baddbmm": (
        EXACT,
        lambda m, x: torch.baddbmm(m.w[None, :1], x[:, None], m.w.expand(x.shape[0], N, N)),
    ),
    "addmm": (EXACT, lambda m, x: torch.addmm(m.w[0], x, m.w)),
    "addmm with samples as bias": (EXACT, lambda m, x: torch.addmm(m.l(x), x, m.w)),
    "addmm of the transpose": (REFUSED, lambda m, x: torch.addmm(m.w, m.w, m.l(x).T)),
    "addmv": (EXACT, lambda m, x: torch.addmv(m.w[0, 0], x, m.w[1])[:, None] * x),
    "mv": (EXACT, lambda m, x: torch.mv(m.l(x), m.w[0])),
    "mv the wrong way": (REFUSED, lambda m, x: torch.mv(m.l(x).T, m.w[0])),
    "outer": (EXACT, lambda m, x: torch.outer(m.l(x)[:, 0], m.w[0])),
    "tensordot": (EXACT, lambda m, x: torch.tensordot(x, m.w, ([1], [1]))),
    "tensordot over samples": (REFUSED, lambda m, x: torch.tensordot(m.l(x), m.w, ([0], [0]))),
    "as_strided": (EITHER, lambda m, x: x @ m.w.as_strided((N, N), (1, N))),
    "as_strided with overlap": (EITHER, lambda m, x: x @ m.w.as_strided((N, 3), (1, 4))),
    "unfold toeplitz": (EITHER, lambda m, x: x[:, :2] @ m.w.flatten().unfold(0, 2, 1).T),
    "scattered": (
        EXACT,
        lambda m, x: x @ torch.zeros_like(m.w).index_copy(0, torch.tensor([1, 3]), m.w[:2]),
    ),
    "sampled mask": (EXACT, lambda m, x: x @ (m.w * (m.w > 0))),
    "where": (EXACT, lambda m, x: torch.where(x > 0, m.w[0], m.w[1])),
    "where per sample": (EITHER, lambda m, x: torch.where(x[:, :1] > 0, x, m.w)),
    "clamp by a parameter": (EXACT, lambda m, x: m.l(x).clamp(min=m.w[0])),
    "lerp by a parameter": (EXACT, lambda m, x: torch.lerp(x, m.l(x), m.w[0])),
    "power": (EXACT, lambda m, x: x.abs() ** m.w[0]),
    "written into a buffer": (EXACT, lambda m, x: x @ into_buffer(m.w)),
    "written into activations": (EXACT, lambda m, x: write_column(m.l(x) * 1, m.w)),
    "written over one sample": (EITHER, lambda m, x: write_row(m.l(x) * 1, m.w)),
    "added in place": (EXACT, lambda m, x: (x * 1).add_(m.w[0])),
    "added in place through a view": (EXACT, lambda m, x: add_to_view(x * 1, m.w)),
    "added to a transposed view": (EXACT, lambda m, x: (x * 1).T.add_(m.w[0, :, None]).T),
    "detached once": (EXACT, lambda m, x: x @ (m.w * m.w.detach())),
    "data only": (EXACT, lambda m, x: m.l(x) @ m.w.data),
    "numpy of the parameter": (EXACT, lambda m, x: m.l(x) @ torch.tensor(m.w.detach().numpy())),
    "straight through": (EXACT, lambda m, x: x @ (m.w + (m.w.round() - m.w).detach())),
    "complex view": (EXACT, lambda m, x: complex_scale(m.l(x), m.w)),
    "functional_call with derived weights": (
        EXACT,
        lambda m, x: functional_call(m.l, {"weight": m.w * 2, "bias": m.w[0]}, (x,)),
    ),
    "functional_call with weights of a sample": (
        REFUSED,
        lambda m, x: functional_call(m.l, {"weight": m.l(x), "bias": m.w[0]}, (x,)),
    ),
    "vmap over rows": (EITHER, lambda m, x: torch.func.vmap(lambda r: r @ m.w)(x)),
    "vmap over columns": (
        EITHER,
        lambda m, x: torch.func.vmap(lambda c: m.w @ c, in_dims=1, out_dims=1)(m.l(x)),
    ),
    "vmap over weights": (EITHER, lambda m, x: torch.func.vmap(lambda w: x * w, out_dims=1)(m.w)),
    "jacrev inside": (EITHER, lambda m, x: torch.func.jacrev(lambda w: (x @ w).sum(1))(m.w)[:, 0]),
    "aten overload": (EITHER, lambda m, x: torch.ops.aten.mm.default(x, m.w)),
    "aten overload over samples": (REFUSED, lambda m, x: torch.ops.aten.mm(m.w, m.l(x))),
    "aten addmm, hidden layout": (REFUSED, lambda m, x: torch.ops.aten.t.default(m.l(x) @ m.w)),
    "other thread": (EITHER, lambda m, x: elsewhere(lambda: x @ m.w)),
    "half in another thread": (EITHER, lambda m, x: m.l(x) @ m.w + elsewhere(lambda: x @ m.w)),
    "torch functions disabled": (EITHER, lambda m, x: unseen(lambda: x @ m.w) * m.l(x)),
    "torch functions disabled, partly": (EITHER, lambda m, x: unseen(lambda: x @ m.w) @ m.w),
    "mixing while torch functions are disabled": (
        REFUSED,
        lambda m, x: unseen(lambda: m.l(x).flip(0)) * m.l(x) @ m.w,
    ),
    "in place while torch functions are disabled": (
        REFUSED,
        lambda m, x: hidden_write(m.l(x) * 1, (m.l(x) @ m.w)),
    ),
    "inner gradient step": (REFUSED, lambda m, x: inner_step(m, x, True)),
    "inner gradient step, first order": (EITHER, lambda m, x: inner_step(m, x, False)),
    "gradient of the input": (EITHER, lambda m, x: input_gradient(m, x)),
    "updated in the forward": (EITHER, lambda m, x: update_and_use(m, x)),
    "cumulative": (EXACT, lambda m, x: x * m.w.cumsum(0)[-1]),
    "sorted": (EXACT, lambda m, x: x * m.w[0].sort()[0]),
    "no influence": (EXACT, lambda m, x: m.l(x) + 0 * m.w[0].detach()),
    "zero influence": (EXACT, lambda m, x: m.l(x) + 0 * m.w[0]),
    "unused output": (EXACT, lambda m, x: (x @ m.w, m.l(x))[1]),
    "mixed but unused": (EITHER, lambda m, x: ((x @ m.w).mean(0), m.l(x))[1]),
    "deterministic jitter": (EXACT, lambda m, x: x @ (m.w + 0.01 * rand(N, N, seed=7))),
    "kron": (EXACT, lambda m, x: x[:, :2] @ torch.kron(m.w[:1, :2], m.w[:2, :2]).T[:2]),
    "broadcast (n, 1, d) by a parameter": (EXACT, lambda m, x: (x[:, None] * m.w).prod(1)),
    "broadcast (1, n, d) by a parameter": (REFUSED, lambda m, x: m.l(x)[None] * m.w[:, None]),
    "group norm weight": (EXACT, lambda m, x: F.group_norm(x[..., None], 2, m.w[0], m.w[1])),
    "layer norm weight": (EXACT, lambda m, x: F.layer_norm(x, (N,), m.w[0], m.w[1])),
    "conv kernel": (EXACT, lambda m, x: F.conv1d(x[:, None], m.w[:, None, :3])),
    "conv of unbatched input": (REFUSED, lambda m, x: F.conv1d(m.l(x), m.w[:, :, None])),
    "conv of unbatched raw input": (EITHER, lambda m, x: F.conv1d(x, m.w[:, :, None])),
    "conv over samples": (
        REFUSED,
        lambda m, x: F.conv1d(m.l(x).T[None], m.w[:, :, None].expand(N, N, 3), padding=1)[0].T,
    ),
    "pointwise conv, samples as length": (
        EITHER,
        lambda m, x: F.conv1d(m.l(x).T[None], m.w[:, :, None])[0].T,
    ),
    "depthwise conv, samples as channels": (
        EITHER,
        lambda m, x: F.conv1d(m.l(x)[None], m.w[:, None, :3], padding=1, groups=N)[0],
    ),
    "grouped conv, samples as channels": (
        REFUSED,
        lambda m, x: F.conv1d(m.l(x)[None], m.w[:, :2, None], groups=2)[0],
    ),
    "grouped conv, filters and biases of each sample": (
        EXACT,
        lambda m, x: F.conv1d(x.view(1, -1, 1), m.l(x)[:, :, None], m.l(x)[:, 0], groups=N)[0],
    ),
    "grouped conv of constants, filters of each sample": (
        EXACT,
        lambda m, x: (
            F.conv1d(PIXELS, m.l(x)[:, :, None], groups=1)[0]
            + F.conv1d(PIXELS, m.l(x)[:, :1, None], m.w[0], groups=N)[0]
            + F.conv1d(PIXELS, m.w[:, :, None], m.l(x)[:, 0])[0]
        ),
    ),
    "conv of constants, samples as channels of filters": (
        REFUSED,
        lambda m, x: F.conv1d(PIXELS, m.l(x).T[:, :, None])[0],
    ),
    "conv of constants, filters and biases of others": (
        REFUSED,
        lambda m, x: F.conv1d(PIXELS, m.l(x)[:, :, None], m.l(x)[:, 0].flip(0))[0],
    ),
    "grouped conv, biases of others": (
        REFUSED,
        lambda m, x: F.conv1d(x.view(1, -1, 1), x[:, :, None], m.l(x)[:, 0].flip(0), groups=N)[0],
    ),
    "bilinear form": (EXACT, lambda m, x: F.bilinear(x, m.l(x), m.w[None])),
    "embedding_bag": (EITHER, lambda m, x: F.embedding_bag(x.argsort(1), m.w, mode="sum") * x),
}


def complex_scale(h: Tensor, w: Tensor) -> Tensor:
    """Real numbers seen as complex ones, multiplied by a parameter."""
    pairs = torch.view_as_complex(h.view(-1, 2, 2))
    return torch.view_as_real(pairs * torch.view_as_complex(w[:2, :2].contiguous()))


def into_buffer(w: Tensor) -> Tensor:
    """A parameter copied into a larger constant, entry by entry."""
    buffer = torch.zeros(N, N, dtype=torch.float64)
    for i in range(N):
        buffer[i] = w[N - 1 - i]
    return buffer


def write_column(h: Tensor, w: Tensor) -> Tensor:
    """One feature of every sample is a parameter."""
    h[:, 1] = w[0, 0]
    return h


def write_row(h: Tensor, w: Tensor) -> Tensor:
    """All features of one sample are a parameter."""
    h[0] = w[0] * 2
    return h


def add_to_view(h: Tensor, w: Tensor) -> Tensor:
    """Written through a view, read through the base."""
    h.view(-1, 2, 2)[:, 0].add_(w[0, :2])
    return h * h.detach()


def hidden_write(h: Tensor, g: Tensor) -> Tensor:
    """A write that no mode sees."""
    unseen(lambda: h.mul_(g.flip(0)))
    return h


def inner_step(m: nn.Module, x: Tensor, second: bool) -> Tensor:
    """One step of gradient descent on the whole batch, inside the forward."""
    inner = (x @ m.w).square().mean()
    (grad,) = torch.autograd.grad(inner, m.w, create_graph=second)
    return x @ (m.w - 0.1 * grad)


def input_gradient(m: nn.Module, x: Tensor) -> Tensor:
    """The gradient of a network by its input, as an output."""
    x = x.detach().requires_grad_()
    value = (x @ m.w).tanh().sum()
    return torch.autograd.grad(value, x, create_graph=True)[0]


def update_and_use(m: nn.Module, x: Tensor) -> Tensor:
    """A parameter scaled in place before its use."""
    with torch.no_grad():
        m.w.mul_(0.9)
    return x @ m.w


def cases() -> Iterator[Case]:
    """All of this file."""
    parts = {"l": lin(), "w": 0.7 * rand(N, N, seed=6)}
    return on_module("parameter", SQUARE, rand(N, N), **parts)
