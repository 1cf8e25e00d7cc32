"""Attacks by modules of torch.nn: sizes that agree, unbatched inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    ints,
    lin,
    rand,
    row_losses,
    seeded,
)

Maker = Any


CUBE = rand(N, N, N)


IMAGE = rand(N, N, N, N)


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


def cases() -> Iterator[Case]:
    """All of this file."""
    return layers()
