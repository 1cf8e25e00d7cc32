"""Attacks by recurrent modules, masks and the ways a batch arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Net,
    Table,
    case,
    ints,
    lin,
    on_module,
    rand,
    row_losses,
    seeded,
    spread,
)

CUBE = rand(N, N, N)


LENGTHS = torch.tensor([2, 4, 1, 3])


CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)


def packed(m: nn.Module, x: Tensor, lengths: Tensor, ordered: bool = False) -> Tensor:
    """A GRU on packed samples of different lengths."""
    sequence = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=ordered)
    return pad_packed_sequence(m.r(sequence)[0], batch_first=True, total_length=N)[0]


def packed_data(m: nn.Module, x: Tensor) -> Tensor:
    """The packed rows themselves: time-major, samples interleaved."""
    return m.r(pack_sequence([*m.l(x)]))[0].data.view(N, N, N)


def packed_state(m: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """The last state of packed samples."""
    sequence = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return m.r(sequence)[1].squeeze(0)


def recurrent() -> Iterator[Case]:
    """Packed sequences and initial states."""
    gru = seeded(nn.GRU(N, N, batch_first=True))
    down = torch.tensor([4, 3, 2, 1])
    yield case("packed: unsorted", EITHER, packed, CUBE, LENGTHS, r=gru)
    yield case("packed: sorted", EITHER, lambda m, x, k: packed(m, x, k, True), CUBE, down, r=gru)
    yield case("packed: data as if padded", REFUSED, packed_data, CUBE, r=gru, l=lin())
    yield case("packed: state", EITHER, packed_state, CUBE, LENGTHS, r=gru)
    table: Table = {
        "initial state": (EXACT, lambda m, x: m.r(x, m.s.expand(1, x.shape[0], N).contiguous())[0]),
        "initial state of samples": (EXACT, lambda m, x: m.r(x, m.l(x[:, 0])[None])[0]),
        "initial state of other samples": (
            REFUSED,
            lambda m, x: m.r(m.l(x), m.l(x[:, 0]).flip(0)[None])[0],
        ),
        "state per layer and sample": (EITHER, lambda m, x: m.r(x, m.w[None])[0]),
        "time reversed": (EXACT, lambda m, x: m.r(x.flip(1))[0]),
        "samples as time": (REFUSED, lambda m, x: m.r(m.l(x).transpose(0, 1))[0].transpose(0, 1)),
    }
    parts = {"r": gru, "l": lin(), "s": rand(N), "w": rand(N, N)}
    yield from on_module("recurrent", table, CUBE, **parts)


def shared_masks() -> Iterator[Case]:
    """Modules of torch's that are called directly, with masks of as many positions as samples."""
    table: dict[str, tuple[nn.Module, Callable[[Any, Tensor], Tensor]]] = {
        "attention": (
            nn.MultiheadAttention(N, N, batch_first=True),
            lambda m, x: m(x, x, x, attn_mask=CAUSAL)[0]),
        "attention, by position": (
            nn.MultiheadAttention(N, N, batch_first=True),
            lambda m, x: m(x, x, x, None, False, CAUSAL)[0]),
        "an encoder": (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(N, 2, N, 0.0, batch_first=True), 1,
                enable_nested_tensor=False),
            lambda m, x: m(x, CAUSAL)),
        "an encoder layer": (
            nn.TransformerEncoderLayer(N, 2, N, 0.0, batch_first=True),
            lambda m, x: m(x, src_mask=CAUSAL)),
        "a decoder": (
            nn.TransformerDecoder(nn.TransformerDecoderLayer(N, 2, N, 0.0, batch_first=True), 1),
            lambda m, x: m(x, x.flip(1), tgt_mask=CAUSAL, memory_mask=CAUSAL)),
        "both": (
            nn.Transformer(N, 2, 1, 1, N, 0.0, batch_first=True),
            lambda m, x: m(x, x.flip(1), src_mask=CAUSAL, tgt_mask=CAUSAL)),
    }  # fmt: skip
    for name, (module, out) in table.items():
        losses = lambda m, batch, out=out: spread(out(m, batch[0]))
        yield Case(f"a mask for all samples: {name}", seeded(module), (CUBE,), losses, EXACT)


def overwritten(tokens: Tensor) -> Tensor:
    """What was counted, until data were written to it by another name."""
    places = torch.arange(N)
    places.view(1, N)[0].copy_(tokens)
    return places


def positions() -> Iterator[Case]:
    """Layers of a model that are called directly: with samples, and with what was counted."""
    table: dict[str, tuple[str, Tensor, Callable[..., Tensor]]] = {
        "a table": (EXACT, CUBE, lambda m, x, t: m.l(x) + m.p(torch.arange(N))),
        "a grid": (EXACT, CUBE, lambda m, x, t: m.l(x) * m.k(torch.eye(N).double()).tanh()),
        "steps": (
            EXACT, CUBE, lambda m, x, t: m.l(x) * m.k(torch.linspace(0, 1, N).double().tile(N, 1))),
        "differences": (
            EXACT, CUBE,
            lambda m, x, t: m.l(x) + m.p((torch.arange(N)[:, None] - torch.arange(N)).abs())[0]),
        "a row for each sample": (EXACT, CUBE[0], lambda m, x, t: m.l(x) * m.p(torch.arange(N))),
        "data added": (REFUSED, CUBE, lambda m, x, t: m.l(x) + m.p((torch.arange(N) + t) % N)),
        "data written": (REFUSED, CUBE, lambda m, x, t: m.l(x) + m.p(overwritten(t))),
        "data": (REFUSED, CUBE, lambda m, x, t: m.l(x) + m.p(t)),
    }  # fmt: skip
    for name, (expectation, x, body) in table.items():
        parts = Net(body, l=lin(), k=lin(seed=3), p=seeded(nn.Embedding(N, N)))
        losses = lambda m, batch, body=body: spread(body(m, *batch))
        yield Case(f"positions: {name}", parts, (x, ints(N)), losses, expectation)


def masked() -> Iterator[Case]:
    """Attention masks and padding."""
    mha = seeded(nn.MultiheadAttention(N, N, batch_first=True))
    padding = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 1]]).bool()
    table: Table = {
        "padding": (EXACT, lambda m, x, k: m.a(x, x, x, key_padding_mask=k)[0]),
        "padding as attention mask": (EITHER, lambda m, x, k: m.a(x, x, x, attn_mask=k)[0]),
        "padding of other samples": (
            EITHER,
            lambda m, x, k: m.a(x, x, x, key_padding_mask=k.roll(1, 0))[0],
        ),
        "padding transposed": (EITHER, lambda m, x, k: m.a(x, x, x, key_padding_mask=k.T)[0]),
        "a mask per sample and head": (
            EITHER,
            lambda m, x, k: m.a(
                x, x, x, attn_mask=k.repeat_interleave(N, 0)[:, None].expand(-1, N, N)
            )[0],
        ),
        "keys of other samples": (REFUSED, lambda m, x, k: m.a(m.l(x), m.l(x).flip(0), x)[0]),
        "keys of the first sample": (
            REFUSED,
            lambda m, x, k: m.a(x, m.l(x)[:1].expand(N, N, N), x)[0],
        ),
        "query of parameters": (EXACT, lambda m, x, k: m.a(m.w.expand(x.shape[0], N, N), x, x)[0]),
        "time first inside": (
            EXACT,
            lambda m, x, k: m.f(*[x.transpose(0, 1)] * 3, key_padding_mask=k)[0].transpose(0, 1),
        ),
        "time first inside, left so": (
            REFUSED,
            lambda m, x, k: m.f(*[x.transpose(0, 1)] * 3, key_padding_mask=k)[0],
        ),
    }
    first = seeded(nn.MultiheadAttention(N, 2))
    parts = {"a": mha, "f": first, "l": lin(), "w": rand(N, N)}
    yield from on_module("masked", table, CUBE, padding, **parts)


@dataclass
class Inputs:
    """Not a pytree."""

    x: Tensor
    mask: Tensor


def causal(m: nn.Module, x: Tensor) -> Tensor:
    """A decoder with a causal mask of its own."""
    return m.d(x, m.l(x), tgt_mask=CAUSAL, tgt_is_causal=True)


def inputs() -> Iterator[Case]:
    """The ways a batch arrives."""
    x, y = rand(N, N), rand(N, N, seed=3)
    both = lambda m, a, b: m.l(a) * m.l(b)
    yield case("inputs: two", EXACT, both, x, y)
    model = both_named(lambda m, b, a: m.l(a) * b)
    yield Case("inputs: keywords", model, {"a": x, "b": y}, row_losses, EXACT)
    nested = lambda m, d: m.l(d["a"]) * d["more"][0]
    yield case("inputs: nested", EXACT, nested, {"a": x, "more": [y]})
    ids = lambda m, a, b: m.l(a) + m.l(b)
    yield case("inputs: one of other samples", EITHER, lambda m, a, b: ids(m, a, b.flip(0)), x, y)
    square = lambda m, a, b: m.l(b @ a)
    yield case("inputs: a matrix that looks like samples", EITHER, square, x, y)
    single = lambda m, a: m.l(a) * 2
    yield case("inputs: one sample", EXACT, single, rand(1, N))
    yield case(
        "inputs: one sample, transposed", EXACT, lambda m, a: m.l(a).mean(0, True), rand(1, N)
    )
    norm = lambda m, a: m.l(a) - m.l(a).mean(0)
    yield case("inputs: one sample and a mean", EITHER, norm, rand(1, N))
    masked = lambda m, a, k: (m.l(a) @ a.mT).masked_fill(k, -1e9).softmax(-1)
    yield case("inputs: one sample and a mask", EXACT, masked, rand(1, N, N), CAUSAL)
    yield case("inputs: no sample", EXACT, single, rand(0, N))
    wrapped = dataclass_losses
    net = both_named(lambda m, d: m.l(d.x) * d.mask)
    yield Case("inputs: dataclass", net, (x, y), wrapped, EITHER)
    positions = lambda m, t: m.l(m.e(t) + m.p(torch.arange(N)))
    parts = {"e": seeded(nn.Embedding(N, N)), "p": seeded(nn.Embedding(N, N, sparse=False), 3)}
    yield case("inputs: positions (t,)", EXACT, positions, ints(N, N), l=lin(), **parts)
    one = lambda m, t: m.l(m.e(t) + m.p(torch.arange(N)[None]))
    yield case("inputs: positions (1, t)", EXACT, one, ints(N, N), l=lin(), **parts)
    wrong = lambda m, t: m.l(m.e(t) + m.p(torch.arange(N))[:, None])
    yield case("inputs: positions on samples", EITHER, wrong, ints(N, N), l=lin(), **parts)
    layer = seeded(nn.TransformerDecoderLayer(N, N, N, 0.0, batch_first=True))
    yield case("inputs: decoder", EXACT, causal, CUBE, d=layer, l=lin())


def both_named(body: Any) -> nn.Module:
    """A module around one linear layer."""
    return Net(body, l=lin())


def dataclass_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The model receives one object."""
    return row_losses(model, (Inputs(*batch),))


def cases() -> Iterator[Case]:
    """All of this file."""
    return chain(recurrent(), masked(), shared_masks(), positions(), inputs())
