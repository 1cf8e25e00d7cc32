"""Attacks by writing in place: buffers, views, aliases."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    on_hidden,
)

PERM = torch.tensor([2, 0, 3, 1])


MASK = torch.tensor([True, False, False, True])


def zeros(*shape: int) -> Tensor:
    """A float64 buffer."""
    return torch.zeros(*(shape or (N, N)), dtype=torch.float64)


def write(statements: str) -> Callable[[Tensor], Tensor]:
    """A function of h that runs statements and returns ``out`` (h unless assigned)."""
    code = compile(statements, "<write>", "exec")

    def run(h: Tensor) -> Tensor:
        scope = {"h": h * 1.0, "N": N, "torch": torch, "zeros": zeros, "MASK": MASK, "PERM": PERM}
        exec(code, scope)
        return scope.get("out", scope["h"])

    return run


WRITES: dict[str, tuple[str, str]] = {
    "elementwise": (EXACT, "h.mul_(2).relu_()"),
    "through a view": (EXACT, "h.view(-1).mul_(2)"),
    "view taken before": (EXACT, "v = h.view(2, 8)\nh.mul_(3.0)\nout = v.view(N, N)"),
    "base after a write to a view": (REFUSED, "v = h[0]\nv.add_(h[1].clone())"),
    "constants in a view": (
        EXACT,
        "v = h.view(2, 2, N)\nv[0, 1, 2:].fill_(3.0)\nout = v.view(N, N)",
    ),
    "constants in a view, base after": (EXACT, "h.view(-1)[:6].zero_()\nout = h * h"),
    "constants without gradients": (EXACT, "with torch.no_grad(): h.view(-1)[5:9].zero_()"),
    "another's row over constants": (
        REFUSED,
        "v = h.view(-1)\nv[:N].zero_()\nv[:N] += h[1].clone()",
    ),
    "rows shifted over constants": (REFUSED, "v = h[1:]\ng = h.clone()\nv.zero_()\nv.add_(g[:-1])"),
    "a sum over constants": (EITHER, "v = h[:, 1:]\nv.zero_()\nout = h + v.sum()"),
    "constants across a transposed view": (EXACT, "h.T[1:3].fill_(0.5)\nout = h * h"),
    "sample over sample": (REFUSED, "g = h.clone()\nh[0] = g[1]\nout = h * g"),
    "sample over sample, plain": (REFUSED, "h[0] = h[1].clone() + h[0].clone()"),
    "neighbours by slices": (REFUSED, "h[1:] += h[:-1].clone()"),
    "swap two samples": (REFUSED, "g = h.clone()\nh[[0, 1]] = g[[1, 0]]\nout = h * g"),
    "feature over feature": (EXACT, "h[:, 0] = h[:, 1].clone()"),
    "transposed copy": (REFUSED, "h.T.copy_(h.clone())"),
    "transposed add": (REFUSED, "h.add_(h.T.clone())"),
    "transpose_": (REFUSED, "h.transpose_(0, 1)"),
    "t_ twice": (EXACT, "h.t_()\nh.t_()"),
    "t_ after a write to an alias": (REFUSED, "v = h.view(N, N)\nh.t_()\nv.mul_(2)"),
    "alias keeps its layout after t_": (EITHER, "v = h.view(N, N)\nh.t_()\nout = v * 2"),
    "swapaxes_": (REFUSED, "h.swapaxes_(0, 1)"),
    "unsqueeze_, squeeze_": (EXACT, "h.unsqueeze_(0)\nh.squeeze_(0)"),
    "squeeze_": (EXACT, "out = h[None] * 1\nout.squeeze_(0)"),
    "squeeze_ and transposed": (REFUSED, "h = h[None] * 1\nh.squeeze_(0)\nout = h.T"),
    "squeeze_ of every axis, transposed": (REFUSED, "h = h[None] * 1\nh.squeeze_()\nout = h.T"),
    "squeeze_ of a view, summed": (REFUSED, "v = h[None]\nv.squeeze_(0)\nout = v.sum(0)"),
    "unsqueeze_ and transposed": (REFUSED, "h.unsqueeze_(0)\nout = h[0].T"),
    "t_ of a view": (REFUSED, "v = h.view(N, N)\nv.t_()\nout = v"),
    "view before t_, transposed": (REFUSED, "v = h.view(N, N)\nh.t_()\nout = v.T"),
    "transposed before t_": (REFUSED, "v = h.t()\nh.t_()\nout = v"),
    "swapdims_ and squeeze_": (REFUSED, "h = h[:, None] * 1\nh.swapdims_(0, 2)\nh.squeeze_()"),
    "unsqueeze_ and broadcast": (REFUSED, "g = h.clone()\nh.unsqueeze_(1)\nout = (h * g).sum(1)"),
    "as_strided_": (REFUSED, "h.as_strided_((N, N), (1, N))"),
    "flat alias shifted": (
        REFUSED,
        "a = h.view(-1)\na[4:8].copy_(a[0:4].clone() + a[4:8].clone())",
    ),
    "flat alias within a sample": (EITHER, "a = h.view(-1)\na[4:6].copy_(a[6:8].clone())"),
    "buffer, row by row": (EXACT, "out = zeros()\nfor i in range(N):\n    out[i] = h[i] * 2"),
    "buffer, rows reversed": (
        EITHER,
        "out = zeros()\nfor i in range(N):\n    out[i] = h[N - 1 - i]",
    ),
    "buffer, rows reversed, residual": (
        REFUSED,
        "out = zeros()\nfor i in range(N):\n    out[i] = h[N - 1 - i]\nout = out * h",
    ),
    "buffer, recurrent over samples": (
        REFUSED,
        "out = zeros()\nfor i in range(N):\n    out[i] = h[i] + (out[i - 1].clone() if i else 0)",
    ),
    "buffer, list of rows": (EXACT, "out = zeros(N, 2, N)\nout[:, 0] = h\nout[:, 1] = h ** 2"),
    "buffer, time first": (REFUSED, "out = zeros(N, N, N)\nout[0] = h\nout[1] = h ** 2"),
    "buffer, halves crossed": (
        REFUSED,
        "b = zeros()\nb[:2] = h[2:]\nb[2:] = h[:2]\nout = b * h",
    ),
    "buffer, columns of another order": (
        REFUSED,
        "b = zeros()\nb[:, :2] = h[:, :2]\nb[:, 2:] = h.flip(0)[:, 2:]\nout = b",
    ),
    "buffer written by an alias": (REFUSED, "b = zeros()\na = b[1]\na.copy_(h[0])\nout = b * h"),
    "buffer written by a flat alias": (
        REFUSED,
        "b = zeros()\na = b.view(-1)\na[:] = h.flip(0).flatten()\nout = b * h",
    ),
    "buffer written twice": (
        EITHER,
        "b = zeros()\nb.copy_(h.flip(0))\nb.copy_(h)\nout = b * h",
    ),
    "buffer used before and after": (
        REFUSED,
        "b = zeros()\nb.copy_(h)\na = b * 1\nb.copy_(h.flip(0))\nout = a * b",
    ),
    "buffer by a mask": (EXACT, "b = zeros()\nb[MASK] = h[MASK] * 3\nb[~MASK] = h[~MASK]\nout = b"),
    "buffer by a crossed mask": (
        REFUSED,
        "b = zeros()\nb[MASK] = h[~MASK]\nb[~MASK] = h[MASK]\nout = b * h",
    ),
    "buffer by a mask of entries": (
        EXACT,
        "b = zeros()\nk = h.detach() > 0\nb[k] = h[k] * 2\nout = b",
    ),
    "buffer by a crossed mask of entries": (
        REFUSED,
        "b = zeros()\nk = h.detach().flip(0) > 0\nb[k] = h[h.detach() > 0]\nout = b * h",
    ),
    "broadcast write of one sample": (REFUSED, "b = zeros()\nb[:] = h[0]\nout = b * h"),
    "broadcast write of a column": (REFUSED, "b = zeros()\nb[:] = h[:, 0]\nout = b"),
    "copy_ of a transpose": (REFUSED, "b = zeros()\nb.copy_(h.T)\nout = b"),
    "fill_ with a sample": (REFUSED, "b = zeros()\nb.fill_(h[0, 0])\nout = b * h"),
    "index_add_ in order": (EXACT, "out = zeros().index_add_(0, torch.arange(N), h)"),
    "index_add_ permuted": (REFUSED, "h.index_add_(0, PERM, h.clone())"),
    "put_": (REFUSED, "h.put_(torch.arange(4), h[1].clone() * h[0].clone())"),
    "masked_scatter_": (REFUSED, "g = h.clone()\nh.masked_scatter_(MASK[:, None], g)\nh *= g"),
    "zero_ resets": (EXACT, "b = h.flip(0)\nb.zero_()\nout = h + b"),
    "setitem resets a row": (EXACT, "h[:, 1] = 0.0"),
    "augmented assignment": (EXACT, "h += 1\nh *= 2.0"),
    "augmented with the flip": (REFUSED, "h *= h.flip(0)"),
    "diagonal write": (REFUSED, "g = h.clone()\nh.diagonal().copy_(g[0])"),
    "fill_diagonal_": (EITHER, "h.fill_diagonal_(0.0)"),
    "data reversed": (EITHER, "h.data.copy_(h.data.flip(0))\nout = h * h"),
    "data replaced by its transpose": (EITHER, "h.data = h.data.T\nout = h * 2"),
    "data shared with the detached": (EITHER, "h.detach().mul_(2)\nout = h * h"),
    "numpy writes another order": (
        EITHER,
        "a = h.detach().numpy()\na[:] = a[::-1].copy()\nout = h * h",
    ),
    "numpy mean of samples": (
        EITHER,
        "out = h * torch.from_numpy(h.detach().numpy().mean(0))",
    ),
    "list detour": (EITHER, "out = h * torch.tensor(h.tolist()).flip(0).double()"),
    "set_ to other storage": (EITHER, "b = zeros()\nb.set_(h.detach().flip(0))\nout = h * b"),
    "out= of the detached": (
        EITHER,
        "b = zeros()\ntorch.mul(h.detach(), h.detach().flip(0), out=b)\nout = h * b",
    ),
    "out= in order": (EITHER, "b = zeros()\ntorch.mul(h.detach(), 2, out=b)\nout = h * b"),
    "detached scale": (EXACT, "out = h * h.detach()"),
    "detached, crossed": (EITHER, "out = h * h.detach().flip(0)"),
    "no_grad segment": (
        EITHER,
        "with torch.no_grad():\n    s = h.flip(0) * 2\nout = h * s",
    ),
    "inference of a mask": (EITHER, "out = h * (h.detach() > h.detach().mean(0))"),
    "a loop by the shape": (
        EXACT,
        "out = 0\nfor j in range(h.shape[1]):\n    out = out + h[:, j:j+1] * h",
    ),
    "a loop over samples as features": (
        REFUSED,
        "out = 0\nfor j in range(h.shape[0]):\n    out = out + h[j:j+1] * h",
    ),
    "branch by another sample": (EITHER, "out = h * 2 if h[0, 0] > 0 else h * h"),
    "in place after expand": (REFUSED, "e = h[:1].expand(N, N).clone()\ne.mul_(h)\nout = e"),
    "pop of a stack": (
        EXACT,
        "rows = [h[:, j] for j in range(N)]\nout = torch.stack(rows[::-1], 1)",
    ),
    "resize by view of real": (EXACT, "h.view(N, 2, 2)[:, 0] *= 3"),
    "copy_ with fewer rows": (REFUSED, "h[1:3].copy_(h[0:2].clone() * h[1:3].clone())"),
    "where_ by writing": (EXACT, "h[h.detach() > 0] = 0.25"),
    "writes under a list index": (REFUSED, "g = h.clone()\nh[[0, 2]] = g[[2, 0]] * g[[0, 2]]"),
    "lerp_ with the flip": (REFUSED, "h.lerp_(h.flip(0), 0.5)"),
    "copy of a copy": (
        EXACT,
        "b = zeros()\nb.copy_(h)\nc = torch.empty_like(b)\nc.copy_(b)\nout = c",
    ),
    "renorm_": (REFUSED, "h.renorm_(2, 1, 0.1)"),
    "cumsum_": (REFUSED, "h.cumsum_(0)"),
    "addmm_": (REFUSED, "h.addmm_(h.clone(), h.clone())"),
    "split views, one written": (REFUSED, "a, b = h[:2], h[2:]\na.mul_(b.clone())"),
    "real and imag views": (EXACT, "c = torch.complex(h, h * 2)\nc.real.mul_(3)\nout = c.abs()"),
    "a buffer by its flat view": (EXACT, "b = zeros()\nb.view(-1)[:] = h.reshape(-1)\nout = b * h"),
    "a buffer by its flat view, transposed": (
        REFUSED,
        "b = zeros()\nb.view(-1)[:] = h.T.reshape(-1)\nout = b * h",
    ),
    "a buffer by a flat view of rows": (
        EXACT,
        "b = zeros(2, 2, N)\nb.view(N, N).index_add_(0, PERM, h)\nout = b.view(N, N)[PERM] * h",
    ),
    "a buffer by a flat view of rows, out of order": (
        REFUSED,
        "b = zeros(2, 2, N)\nb.view(N, N).index_add_(0, PERM, h)\nout = b.view(N, N) * h",
    ),
    "element by element, index after index": (
        EXACT,
        "b = zeros()\nfor i in range(N):\n    for j in range(N):\n        b[i][j] = h[i, j]\n"
        "out = b * h",
    ),
    "element by element, one of another sample": (
        REFUSED,
        "b = zeros()\nfor i in range(N):\n    for j in range(N):\n"
        "        b[i][j] = h[i if i * j != 2 else 0, j]\nout = b * h",
    ),
    "rows over rows by a flat view": (
        REFUSED,
        "g = h.clone()\nh.view(-1)[:N] = g[1]\nout = h * g",
    ),
    "a part of a buffer by a view": (
        EXACT,
        "b = zeros(N, 2, N)\nb.view(N, -1)[:, 1:N] = h[:, 1:]\nout = b.sum(1) * h",
    ),
    "a strided view, across": (
        REFUSED,
        "b = zeros()\nb.as_strided((N, N), (1, N)).copy_(h)\nout = b * h",
    ),
    "a strided view, across and back": (
        EXACT,
        "b = zeros()\nb.as_strided((N, N), (1, N)).copy_(h)\nout = b.T * h",
    ),
    "a strided view that overlaps": (
        REFUSED,
        "b = zeros(2 * N)\nfor i in range(N):\n    b.as_strided((N,), (1,), i).add_(h[i])\n"
        "out = h * b[:N]",
    ),
    "overlapping windows at once": (
        REFUSED,
        "b = zeros(N + 1)\nb.as_strided((N, 2), (1, 1)).copy_(h[:, :2])\nout = h + b[:N, None]",
    ),
    "a flat view after its base was written": (
        EITHER,
        "b = zeros()\nv = b.view(-1)\nb[:2] = h[:2]\nv[2 * N :] = h[2:].reshape(-1)\nout = b * h",
    ),
    "two flat views, one after the other": (
        EITHER,
        "b = zeros()\nv, w = b.view(-1), b.view(2, 8)\nv[:N] = h[0]\nw[1] = h[2:].reshape(-1)\n"
        "out = b * h",
    ),
}


def cases() -> Iterator[Case]:
    """All of this file."""
    writes = {name: (e, write(statements)) for name, (e, statements) in WRITES.items()}
    return on_hidden("write", writes)
