"""Attacks by odd subscripts, batches of one or two, and inputs that look like samples."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Table,
    case,
    ints,
    lin,
    on_hidden,
    on_module,
    rand,
    seeded,
)

EVERY = torch.arange(N)


LABELS = torch.tensor([3, 0, 1, 0])


SUBSCRIPTS: Table = {
    "True": (EXACT, lambda h: h[True][0]),
    "True, transposed": (REFUSED, lambda h: h[True].transpose(0, 1)[:, 0].T),
    "tensor of one truth": (EITHER, lambda h: h[torch.tensor(True)][0]),
    "list of truths": (EITHER, lambda h: h[[True, False, True, True]]),
    "list of truths, residual": (REFUSED, lambda h: h[[True, False, True, True]] * h[:3]),
    "list": (REFUSED, lambda h: h * h[[1, 0, 3, 2]]),
    "range": (EITHER, lambda h: h * h[list(range(N))]),
    "numpy array": (REFUSED, lambda h: h * h[np.array([1, 0, 3, 2])]),
    "numpy mask": (REFUSED, lambda h: h[np.array([True, False, True, True])] * h[1:]),
    "numpy integer": (REFUSED, lambda h: h * h[np.int64(1)]),
    "tensor integer": (REFUSED, lambda h: h * h[torch.tensor(1)]),
    "nested list": (EITHER, lambda h: h[torch.tensor([[0, 1], [2, 3]])].flatten(0, 1)),
    "nested list, transposed": (
        REFUSED,
        lambda h: h * h[torch.tensor([[0, 2], [1, 3]])].flatten(0, 1),
    ),
    "None in front": (REFUSED, lambda h: (h[None] * h[:, None]).sum(0)),
    "ellipsis": (EXACT, lambda h: h[..., 1:]),
    "ellipsis in front of samples": (EXACT, lambda h: h[..., :, :]),
    "negative stop": (REFUSED, lambda h: h[:-1] * h[1:]),
    "strided": (REFUSED, lambda h: h[::2] * h[1::2]),
    "slice beyond the end": (EXACT, lambda h: h[:99] * h),
    "own entry": (EXACT, lambda h: h[EVERY, LABELS]),
    "own entry, column index": (EXACT, lambda h: h[EVERY[:, None], LABELS[:, None]]),
    "own entries by broadcasting": (EITHER, lambda h: h[EVERY[:, None], LABELS]),
    "others by broadcasting": (REFUSED, lambda h: h[EVERY, LABELS[:, None]]),
    "advanced after a slice": (EXACT, lambda h: h[:, [1, 0]]),
    "advanced in three axes": (
        EITHER,
        lambda h: h.view(N, 2, 2)[EVERY, [0, 1, 0, 1], [1, 1, 0, 0]],
    ),
    "advanced split by a slice": (EITHER, lambda h: h.view(N, 2, 2)[EVERY, :, [0, 1, 0, 1]]),
    "advanced split by a slice, samples sliced": (
        REFUSED,
        lambda h: h.view(N, 2, 2).permute(1, 0, 2)[[0, 1, 0, 1], :, [0, 1, 1, 0]],
    ),
    "mask in two axes": (EITHER, lambda h: h[torch.eye(N).bool()]),
    "mask in two axes, off the diagonal": (
        EITHER,
        lambda h: h[torch.eye(N).bool().roll(1, 0)] * h.diagonal(),
    ),
    "mask of features": (EXACT, lambda h: h[:, torch.tensor([True, False, True, True])]),
    "uint8 mask": (REFUSED, lambda h: h[torch.tensor([1, 0, 1, 1], dtype=torch.uint8)] * h[1:]),
    "int32 index": (REFUSED, lambda h: h * h[EVERY.flip(0).int()]),
    "empty index": (EITHER, lambda h: torch.cat([h[[]], h])),
    "index by its own argmax": (EXACT, lambda h: h[EVERY, h.argmax(1)]),
    "samples by its own argmax": (REFUSED, lambda h: h * h[h.argmax(1)]),
    "columns by the argmax of others": (EITHER, lambda h: h[EVERY, h.argmax(1).flip(0)]),
    "set by broadcasting one row": (REFUSED, lambda h: store(h, (EVERY,), h[0]) * h),
    "set own entry": (EXACT, lambda h: store(h, (EVERY, LABELS), h[:, 0])),
    "set entry of others": (REFUSED, lambda h: store(h, (LABELS, EVERY), h[:, 0]) * h),
    "set a column by a row": (EITHER, lambda h: store(h, (slice(None), 0), h[0])),
    "set with a permuted mask": (
        REFUSED,
        lambda h: store(h, (torch.tensor([True, True, False, False]),), h[2:]) * h,
    ),
    "set with None": (REFUSED, lambda h: store(h, (None, slice(None)), h.T[None])),
    "set nothing": (EXACT, lambda h: store(h, (slice(0, 0),), h[:0]) + h),
}


def store(h: Tensor, place: tuple[object, ...], value: Tensor) -> Tensor:
    """A buffer of zeros with something written into it."""
    buffer = torch.zeros_like(h)
    buffer[place] = value
    return buffer


def ones() -> Iterator[Case]:
    """A batch of one: every axis of size one may be taken for the samples."""
    table: Table = {
        "broadcast to five rows": (EITHER, lambda m, x: m.l(x) + rand(5, N)),
        "broadcast to five rows, summed": (EITHER, lambda m, x: (m.l(x) + rand(5, N)).sum(0)[None]),
        "squeezed": (EITHER, lambda m, x: m.l(x).squeeze()[None]),
        "transposed": (EITHER, lambda m, x: m.l(x).T),
        "transposed, a loss per feature": (EITHER, lambda m, x: m.l(x).T.square().sum(1)),
        "mean": (EXACT, lambda m, x: m.l(x).mean(0, keepdim=True)),
        "viewed as features": (EITHER, lambda m, x: m.l(x).view(N, 1)),
        "expanded": (EITHER, lambda m, x: m.l(x).expand(3, N)),
        "repeated and averaged": (EXACT, lambda m, x: m.l(x).repeat(3, 1).mean(0, True)),
        "unbatched use": (EXACT, lambda m, x: m.l(x[0])[None]),
        "softmax over samples": (EITHER, lambda m, x: m.l(x).softmax(0) * m.l(x)),
        "parameter row": (EITHER, lambda m, x: m.l(x) + m.l.weight[:1]),
        "parameter rows": (EITHER, lambda m, x: m.l(x) + m.l.weight),
        "batch norm": (
            EITHER,
            lambda m, x: F.batch_norm(m.l(x).expand(2, N) * rand(2, 1), None, None, training=True)[
                :1
            ],
        ),
        "outer with itself": (EITHER, lambda m, x: (m.l(x).T @ m.l(x))[None]),
    }
    return on_module("one", table, rand(1, N), l=lin())


def twos() -> Iterator[Case]:
    """Batches of two, the size of a pair of numbers."""
    pairs: Table = {
        "complex parts": (EXACT, lambda h: torch.view_as_real(torch.complex(h, h * h))),
        "complex parts of a transpose": (
            REFUSED,
            lambda h: torch.view_as_complex(h.T.contiguous()).abs(),
        ),
        "complex parts in front": (
            REFUSED,
            lambda h: torch.view_as_real(torch.complex(h, h * h)).permute(2, 0, 1),
        ),
        "unbind in two": (REFUSED, lambda h: torch.stack([h[0] + h[1], h[0] - h[1]])),
        "maximum of two": (REFUSED, lambda h: torch.stack([torch.maximum(*h), torch.minimum(*h)])),
        "cat of both orders": (REFUSED, lambda h: torch.cat([h, h.flip(0)], 1)),
        "cross of rows": (REFUSED, lambda h: h * torch.dot(*h)),
        "where of two": (REFUSED, lambda h: torch.where(h > 0, h[0], h[1])),
        "starred": (REFUSED, lambda h: torch.stack(torch.broadcast_tensors(*h))[[1, 0]] * h),
        "polar": (REFUSED, lambda h: torch.view_as_real(torch.polar(h[0].abs(), h[1])).T),
    }
    return on_hidden("two", pairs, 2, 4)


def lookalikes() -> Iterator[Case]:
    """Inputs with n rows that are no samples; the first input is not a batch."""
    x = rand(N, N)
    weights = rand(N, seed=4).abs()
    losses = lambda m, x, y, w: F.cross_entropy(m.l(x), y, weight=w, reduction="none")
    yield case("lookalike: class weights as input", EITHER, losses, x, ints(N), weights)
    scale = lambda m, x, w: m.l(x) * w
    yield case("lookalike: feature scales as input", EITHER, scale, x, weights)
    table = lambda m, x, e: m.l(e[x.argmax(1)])
    yield case("lookalike: table as input", EITHER, table, x, rand(N, N, seed=8))
    steps = lambda m, p, x: m.l(x + p)
    yield case("lookalike: positions (1, t) first", EITHER, steps, rand(1, N), x)
    scalar = lambda m, s, x: m.l(x) * s
    yield case("lookalike: number first", EITHER, scalar, torch.tensor(2.0), x)
    number = lambda m, s, x: m.l(x) * s
    yield case("lookalike: float first", EXACT, number, 2.0, x)
    bag = seeded(nn.EmbeddingBag(9, N, mode="sum"))
    tokens = ints(8, high=9)
    offsets = torch.tensor([0, 2, 4, 6])
    flat = lambda m, t, o: m.e(t, o)
    yield case("lookalike: flat tokens and offsets", EITHER, flat, tokens, offsets, e=bag)
    four = ints(N, high=9)
    yield case("lookalike: n flat tokens and n offsets", EITHER, flat, four, torch.arange(N), e=bag)
    skew = torch.tensor([0, 0, 1, 3])
    yield case("lookalike: n flat tokens, uneven bags", REFUSED, flat, four, skew, e=bag)
    packed = lambda m, x, i: torch.zeros(N, N).double().index_add(0, i, m.l(x))
    yield case("lookalike: graph assignment as input", REFUSED, packed, x, LABELS)


def cases() -> Iterator[Case]:
    """All of this file."""
    return chain(on_hidden("subscript", SUBSCRIPTS), ones(), twos(), lookalikes())
