"""Attacks by modules of torch.nn: sizes that agree, samples on the wrong axis, unbatched inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from .attacks_base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Table,
    case,
    ints,
    lin,
    on_module,
    rand,
    row_losses,
    seeded,
)

Maker = Any
CUBE = rand(N, N, N)
IMAGE = rand(N, N, N, N)
LENGTHS = torch.tensor([2, 4, 1, 3])
CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)

LAYERS: dict[str, tuple[str, Maker, Tensor]] = {
    "conv1d": (EXACT, lambda: nn.Conv1d(N, N, 3, padding=1), CUBE),
    "conv1d, groups": (EXACT, lambda: nn.Conv1d(N, N, 3, groups=N), CUBE),
    "conv1d, circular": (
        EXACT,
        lambda: nn.Conv1d(N, N, 3, padding=1, padding_mode="circular"),
        CUBE,
    ),
    "conv2d": (EXACT, lambda: nn.Conv2d(N, N, 3, padding="same"), IMAGE),
    "conv2d, strided and dilated": (EXACT, lambda: nn.Conv2d(N, 2, 2, stride=2, dilation=2), IMAGE),
    "conv2d, groups": (EXACT, lambda: nn.Conv2d(N, 2 * N, 3, padding=1, groups=2), IMAGE),
    "conv2d, unbatched": (EITHER, lambda: nn.Conv2d(N, N, 3, padding=1), CUBE),
    "conv2d, unbatched depthwise": (EITHER, lambda: nn.Conv2d(N, N, 3, padding=1, groups=N), CUBE),
    "conv3d, unbatched": (EITHER, lambda: nn.Conv3d(N, N, 3, padding=1), IMAGE),
    "transposed conv1d": (EXACT, lambda: nn.ConvTranspose1d(N, N, 3, stride=2), CUBE),
    "transposed conv2d": (EXACT, lambda: nn.ConvTranspose2d(N, N, 3, 2, 1, 1, groups=2), IMAGE),
    "transposed conv3d": (EXACT, lambda: nn.ConvTranspose3d(N, 2, 2), rand(N, N, 2, 3, 2)),
    "transposed conv1d, unbatched": (EITHER, lambda: nn.ConvTranspose1d(N, N, 3), rand(N, N)),
    "instance norm": (EXACT, lambda: nn.InstanceNorm1d(N, affine=True), CUBE),
    "instance norm, tracked": (
        EXACT,
        lambda: nn.InstanceNorm1d(N, affine=True, track_running_stats=True),
        CUBE,
    ),
    "instance norm, tracked, eval": (
        EXACT,
        lambda: nn.InstanceNorm1d(N, affine=True, track_running_stats=True).eval(),
        CUBE,
    ),
    "instance norm, unbatched": (EITHER, lambda: nn.InstanceNorm1d(N, affine=True), rand(N, N)),
    "group norm": (EXACT, lambda: nn.GroupNorm(2, N), CUBE),
    "layer norm over two axes": (EXACT, lambda: nn.LayerNorm((N, N)), CUBE),
    "layer norm over the batch": (
        REFUSED,
        lambda: nn.Sequential(lin(), nn.LayerNorm((N, N))),
        rand(N, N),
    ),
    "layer norm over the raw batch": (EITHER, lambda: nn.LayerNorm((N, N)), rand(N, N)),
    "rms norm": (EXACT, lambda: nn.RMSNorm(N), CUBE),
    "batch norm on raw input": (EITHER, lambda: nn.BatchNorm1d(N), rand(N, N)),
    "batch norm on raw input, then a layer": (
        EITHER,
        lambda: nn.Sequential(nn.BatchNorm1d(N, affine=False), lin()),
        rand(N, N),
    ),
    "batch norm": (REFUSED, lambda: nn.Sequential(lin(), nn.BatchNorm1d(N)), rand(N, N)),
    "batch norm, not affine": (
        REFUSED,
        lambda: nn.Sequential(lin(), nn.BatchNorm1d(N, affine=False)),
        rand(N, N),
    ),
    "batch norm, no statistics, eval": (
        REFUSED,
        lambda: nn.Sequential(lin(), nn.BatchNorm1d(N, track_running_stats=False)).eval(),
        rand(N, N),
    ),
    "batch norm, eval": (EXACT, lambda: nn.Sequential(lin(), nn.BatchNorm1d(N)).eval(), rand(N, N)),
    "batch norm 2d, eval": (EXACT, lambda: nn.BatchNorm2d(N).eval(), IMAGE),
    "batch norm 1d on a cube": (REFUSED, lambda: nn.Sequential(lin(), nn.BatchNorm1d(N)), CUBE),
    "sync batch norm, eval": (EXACT, lambda: nn.SyncBatchNorm(N).eval(), rand(N, N)),
    "embedding": (EXACT, lambda: nn.Embedding(N, N), ints(N, N)),
    "embedding, padding": (EXACT, lambda: nn.Embedding(N, N, padding_idx=1), ints(N, N)),
    "embedding, scaled by frequency": (
        EITHER,
        lambda: nn.Embedding(N, N, scale_grad_by_freq=True),
        ints(N, N),
    ),
    "embedding, sparse": (EITHER, lambda: nn.Embedding(N, N, sparse=True), ints(N, N)),
    "embedding, max norm": (EITHER, lambda: nn.Embedding(N, N, max_norm=0.1), ints(N, N)),
    "embedding bag, sum": (EXACT, lambda: nn.EmbeddingBag(N, N, mode="sum"), ints(N, N)),
    "embedding bag, mean": (EXACT, lambda: nn.EmbeddingBag(N, N), ints(N, N)),
    "embedding bag, max": (EXACT, lambda: nn.EmbeddingBag(N, N, mode="max"), ints(N, N)),
    "embedding bag, padding": (
        EXACT,
        lambda: nn.EmbeddingBag(N, N, padding_idx=0, mode="sum"),
        ints(N, N),
    ),
    "embedding bag, scaled by frequency": (
        EITHER,
        lambda: nn.EmbeddingBag(N, N, mode="sum", scale_grad_by_freq=True),
        ints(N, N),
    ),
    "prelu": (EXACT, lambda: nn.PReLU(), CUBE),
    "prelu, per channel": (EXACT, lambda: nn.PReLU(N), CUBE),
    "prelu, per channel of (n, c)": (EXACT, lambda: nn.PReLU(N), rand(N, N)),
    "bidirectional lstm": (
        EXACT,
        lambda: First(nn.LSTM(N, N, batch_first=True, bidirectional=True)),
        CUBE,
    ),
    "lstm, two layers": (EXACT, lambda: First(nn.LSTM(N, N, 2, batch_first=True)), CUBE),
    "lstm, projected": (EXACT, lambda: First(nn.LSTM(N, N, proj_size=2, batch_first=True)), CUBE),
    "lstm, time first": (REFUSED, lambda: First(nn.LSTM(N, N)), CUBE),
    "gru": (EXACT, lambda: First(nn.GRU(N, N, batch_first=True)), CUBE),
    "gru, time first": (REFUSED, lambda: First(nn.GRU(N, N)), CUBE),
    "rnn, unbatched": (REFUSED, lambda: First(nn.RNN(N, N)), rand(N, N)),
    "rnn, relu": (EXACT, lambda: First(nn.RNN(N, N, batch_first=True, nonlinearity="relu")), CUBE),
    "rnn cell": (EXACT, lambda: nn.RNNCell(N, N), rand(N, N)),
    "gru cell": (EXACT, lambda: nn.GRUCell(N, N), rand(N, N)),
    "lstm cell": (EXACT, lambda: First(nn.LSTMCell(N, N)), rand(N, N)),
    "last state of a gru": (EXACT, lambda: Second(nn.GRU(N, N, batch_first=True)), CUBE),
    "all states of a gru": (
        REFUSED,
        lambda: Second(nn.GRU(N, N, 4, batch_first=True), squeeze=False),
        CUBE,
    ),
    "encoder layer": (
        EXACT,
        lambda: nn.TransformerEncoderLayer(N, N, N, 0.0, batch_first=True),
        CUBE,
    ),
    "encoder layer, norm first": (
        EXACT,
        lambda: nn.TransformerEncoderLayer(N, N, N, 0.0, batch_first=True, norm_first=True),
        CUBE,
    ),
    "encoder layer, eval": (
        EXACT,
        lambda: nn.TransformerEncoderLayer(N, N, N, batch_first=True).eval(),
        CUBE,
    ),
    "encoder layer, time first": (REFUSED, lambda: nn.TransformerEncoderLayer(N, N, N, 0.0), CUBE),
    "encoder layer, unbatched": (
        REFUSED,
        lambda: nn.TransformerEncoderLayer(N, N, N, 0.0, batch_first=True),
        rand(N, N),
    ),
    "lazy linear": (EITHER, lambda: nn.Sequential(nn.LazyLinear(N)), None),
    "flatten everything": (
        REFUSED,
        lambda: nn.Sequential(lin(), nn.Flatten(0), nn.Linear(N * N, N)),
        rand(N, N),
    ),
    "flatten": (EXACT, lambda: nn.Sequential(nn.Flatten(), nn.Linear(N * N, N)), CUBE),
    "unflatten": (EXACT, lambda: nn.Sequential(lin(), nn.Unflatten(1, (2, 2))), rand(N, N)),
    "unflatten samples": (
        REFUSED,
        lambda: nn.Sequential(lin(), nn.Unflatten(0, (2, 2))),
        rand(N, N),
    ),
    "softmax without axis": (REFUSED, lambda: nn.Sequential(lin(), nn.Softmax()), CUBE),
    "softmax2d, unbatched": (REFUSED, lambda: nn.Sequential(lin(), nn.Softmax2d()), CUBE),
    "pixel shuffle": (EXACT, lambda: nn.Sequential(nn.Conv2d(N, N, 1), nn.PixelShuffle(2)), IMAGE),
    "pixel shuffle, unbatched": (REFUSED, lambda: nn.Sequential(lin(), nn.PixelShuffle(2)), CUBE),
    "channel shuffle": (
        EXACT,
        lambda: Residual(nn.Sequential(lin(), nn.ChannelShuffle(2))),
        CUBE,
    ),
    "max pool": (EXACT, lambda: nn.Sequential(nn.Conv2d(N, N, 1), nn.MaxPool2d(2)), IMAGE),
    "max pool, unbatched": (EXACT, lambda: nn.Sequential(lin(), nn.MaxPool2d(2)), CUBE),
    "adaptive pool": (EXACT, lambda: nn.Sequential(lin(), nn.AdaptiveAvgPool1d(2)), CUBE),
    "adaptive pool 3d, unbatched": (
        EITHER,
        lambda: nn.Sequential(lin(), nn.AdaptiveAvgPool3d(2)),
        IMAGE,
    ),
    "unfold": (EXACT, lambda: nn.Sequential(nn.Unfold(2), nn.Conv1d(4 * N, N, 1)), IMAGE),
    "upsample": (
        EXACT,
        lambda: nn.Sequential(lin(), nn.Upsample(scale_factor=2, mode="linear")),
        CUBE,
    ),
    "zero pad, unbatched": (EXACT, lambda: nn.Sequential(lin(), nn.ZeroPad2d(1)), CUBE),
    "reflection pad over samples": (
        EITHER,
        lambda: nn.Sequential(lin(), nn.ReflectionPad3d(1)),
        IMAGE,
    ),
    "cosine": (EXACT, lambda: Twice(nn.CosineSimilarity(), lin(), lin(seed=1)), rand(N, N)),
    "cosine over samples": (
        REFUSED,
        lambda: Twice(nn.CosineSimilarity(0), lin(), lin(seed=1)),
        rand(N, N),
    ),
    "bilinear": (EXACT, lambda: Twice(nn.Bilinear(N, N, N), lin(), lin(seed=1)), rand(N, N)),
    "attention": (EXACT, lambda: Self(nn.MultiheadAttention(N, N, batch_first=True)), CUBE),
    "attention, time first": (REFUSED, lambda: Self(nn.MultiheadAttention(N, N)), CUBE),
    "attention, unbatched": (REFUSED, lambda: Self(nn.MultiheadAttention(N, N)), rand(N, N)),
    "attention, extra keys": (
        EXACT,
        lambda: Self(
            nn.MultiheadAttention(N, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True)
        ),
        CUBE,
    ),
    "attention, causal": (
        EXACT,
        lambda: Self(nn.MultiheadAttention(N, N, batch_first=True), attn_mask=CAUSAL),
        CUBE,
    ),
    "attention, weights out": (
        EXACT,
        lambda: Self(nn.MultiheadAttention(N, 2, batch_first=True), 1),
        CUBE,
    ),
    "attention, weights of every head": (
        EXACT,
        lambda: Self(nn.MultiheadAttention(N, N, batch_first=True), 1, average_attn_weights=False),
        CUBE,
    ),
}


class First(nn.Module):
    """The first output of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Second(First):
    """The last state of a recurrent module, (layers, n, d)."""

    def __init__(self, inner: nn.Module, squeeze: bool = True) -> None:
        super().__init__(inner)
        self.squeeze = squeeze

    def forward(self, x: Tensor) -> Tensor:
        state = self.inner(x)[1]
        return state.squeeze(0) if self.squeeze else state


class Residual(First):
    """The input times the output."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inner(x)


class Twice(nn.Module):
    """A module of two arguments, on two layers' outputs."""

    def __init__(self, join: nn.Module, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.join, self.a, self.b = join, a, b

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.a(x), self.b(x))


class Self(nn.Module):
    """Self-attention."""

    def __init__(self, attention: nn.Module, take: int = 0, **options: Any) -> None:
        super().__init__()
        self.attention, self.take, self.options = attention, take, options

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, **self.options)[self.take]


def layers() -> Iterator[Case]:
    """One module each."""
    for name, (expectation, make, x) in LAYERS.items():
        if x is None:
            x, model = rand(N, N), make()
            model(x.float())
            model = seeded(model)
        else:
            training = (model := make()).training
            model = seeded(model).train(training)
        yield Case(f"layer: {name}", model, (x,), row_losses, expectation)


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
    from .attacks_base import Net

    return Net(body, l=lin())


def dataclass_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The model receives one object."""
    return row_losses(model, (Inputs(*batch),))


def cases() -> Iterator[Case]:
    """All of this file."""
    return chain(layers(), recurrent(), masked(), inputs())
