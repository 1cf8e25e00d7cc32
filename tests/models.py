"""A zoo of tiny named models: each one trait that has gone wrong somewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

Case = tuple[nn.Module, tuple[Any, ...]]
MODELS: dict[str, Callable[[int], Case]] = {}


def model(build: Callable[[int], Case]) -> Callable[[int], Case]:
    MODELS[build.__name__] = build
    return build


class Fn(nn.Module):
    """A function with modules, parameters and buffers as attributes."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in members.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def par(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.3)


def flat_loss(out: Any) -> Tensor:
    """One loss per sample from outputs whose axis 0 holds the samples."""
    out = out[0] if isinstance(out, (tuple, list)) else out
    if out.is_complex():
        out = torch.view_as_real(out)
    return out.flatten(1).square().mean(1)


@model
def mlp(n: int) -> Case:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), (torch.randn(n, 5),)


@model
def inplace_relu(n: int) -> Case:
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3))
    return net, (torch.randn(n, 5),)


@model
def linear_on_4d(n: int) -> Case:
    return nn.Linear(5, 3), (torch.randn(n, 2, 3, 5),)


@model
def biases_that_are_broadcast(n: int) -> Case:
    net = Fn(
        lambda s, x: F.linear(
            F.linear(F.linear(s.l(x), s.w, s.one).tanh(), s.w, s.row).tanh() + s.l(x),
            s.w,
            s.positions + s.none.expand(4),
        ),
        l=nn.Linear(5, 4),
        w=par(4, 4),
        one=par(1),
        row=par(1, 4),
        positions=par(3, 4),
        none=par(),
    )
    return net, (torch.randn(n, 3, 5),)


@model
def biases_that_are_broadcast_in_small_layers(n: int) -> Case:
    net = Fn(
        lambda s, x: F.linear(F.linear(F.linear(x, s.a, s.one).tanh(), s.b, s.none), s.b, s.row),
        a=par(4, 5),
        b=par(4, 4),
        one=par(1),
        none=par(),
        row=par(1, 4),
    )
    return net, (torch.randn(n, 5),)


@model
def a_number_that_is_expanded(n: int) -> Case:
    net = Fn(lambda s, x: s.l(x) * s.scale.expand(3, 4), l=nn.Linear(5, 4), scale=par())
    return net, (torch.randn(n, 3, 5),)


@model
def convnet(n: int) -> Case:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2, stride=2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    return net, (torch.randn(n, 3, 8, 8),)


@model
def conv_reflect(n: int) -> Case:
    return nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (torch.randn(n, 3, 5, 5),)


@model
def conv_transposed(n: int) -> Case:
    net = nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1)
    return net, (torch.randn(n, 3, 4, 4),)


@model
def batchnorm_eval(n: int) -> Case:
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)).eval()
    return net, (torch.randn(n, 5),)


@model
def instancenorm(n: int) -> Case:
    return nn.InstanceNorm1d(3, affine=True), (torch.randn(n, 3, 5),)


@model
def layernorm_without_bias(n: int) -> Case:
    return nn.LayerNorm(5, bias=False), (torch.randn(n, 4, 5),)


@model
def raw_parameters(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        return ((x @ s.w + s.b).tanh() * s.g).sin()

    return Fn(f, w=par(5, 3), b=par(3), g=par(1)), (torch.randn(n, 6, 5),)


@model
def scalar_parameter(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        return s.l(x) * s.scale.exp() + s.shift

    scale, shift = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(0.1))
    return Fn(f, l=nn.Linear(5, 3), scale=scale, shift=shift), (torch.randn(n, 4, 5),)


@model
def einsum(n: int) -> Case:
    net = Fn(lambda s, x: torch.einsum("btd,hde->bhte", x, s.w).tanh(), w=par(2, 5, 3))
    return net, (torch.randn(n, 6, 5),)


@model
def transposed_addmm(n: int) -> Case:
    net = Fn(lambda s, x: torch.addmm(s.b, x, s.w.t()), w=par(3, 5), b=par(3))
    return net, (torch.randn(n, 5),)


@model
def fused_qkv(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w) for w in s.w.chunk(3))
        return (q @ k.mT).softmax(-1) @ v

    return Fn(f, w=par(15, 5)), (torch.randn(n, n or 2, 5),)


@model
def weight_norm(n: int) -> Case:
    first = parametrizations.weight_norm(nn.Linear(5, 7))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(7, 2)), (torch.randn(n, 5),)


@model
def spectral_norm(n: int) -> Case:
    layer = parametrizations.spectral_norm(nn.Linear(5, 7)).eval()
    return nn.Sequential(layer, nn.Tanh()), (torch.randn(n, 5),)


@model
def orthogonal(n: int) -> Case:
    return parametrizations.orthogonal(nn.Linear(4, 4)), (torch.randn(n, 4),)


@model
def lora(n: int) -> Case:
    net = Fn(
        lambda s, x: F.linear(x, s.w + s.B @ s.A).tanh(), w=par(3, 5), A=par(2, 5), B=par(3, 2)
    )
    return net, (torch.randn(n, 5),)


@model
def softmax_of_parameter(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        a = s.alpha.softmax(0)
        return a[0] * x + a[1] * x.tanh() + a[2] * x.sin()

    return Fn(f, alpha=par(3)), (torch.randn(n, 5),)


@model
def tied_embedding_and_head(n: int) -> Case:
    net = Fn(lambda s, i: F.linear(s.e(i).tanh(), s.e.weight), e=nn.Embedding(9, 5))
    return net, (torch.randint(9, (n, 6)),)


@model
def padded_embedding(n: int) -> Case:
    return nn.Embedding(5, 3, padding_idx=1), (torch.randint(5, (n, 6)),)


@model
def embedding_bag(n: int) -> Case:
    return nn.EmbeddingBag(5, 3, mode="mean"), (torch.randint(5, (n, 6)),)


@model
def module_called_twice(n: int) -> Case:
    return Fn(lambda s, x: s.l(s.l(x).tanh()), l=nn.Linear(5, 5)), (torch.randn(n, 5),)


@model
def module_and_functional_use(n: int) -> Case:
    net = Fn(lambda s, x: s.l(x) + F.linear(x.tanh(), s.l.weight.t()), l=nn.Linear(5, 5))
    return net, (torch.randn(n, 5),)


@model
def keyword_call(n: int) -> Case:
    return Fn(lambda s, x: s.l(input=x), l=nn.Linear(5, 3)), (torch.randn(n, 5),)


@model
def flattened_tokens(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        return s.m(s.l(x.reshape(-1, 5)).tanh().view(x.size(0), -1, 5))

    return Fn(f, l=nn.Linear(5, 5), m=nn.Linear(5, 3)), (torch.randn(n, 6, 5),)


@model
def time_first_square(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        return s.l(x.transpose(0, 1)).tanh().transpose(0, 1)

    return Fn(f, l=nn.Linear(5, 5)), (torch.randn(n, n or 2, 5),)


@model
def time_first_flattened(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        return s.l(x.transpose(0, 1).reshape(-1, 5)).tanh().view(6, -1, 5).transpose(0, 1)

    return Fn(f, l=nn.Linear(5, 5)), (torch.randn(n, 6, 5),)


@model
def frames(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        return s.c(x.flatten(0, 1)).relu().unflatten(0, (x.size(0), 3)).mean(1)

    return Fn(f, c=nn.Conv2d(2, 4, 3)), (torch.randn(n, 3, 2, 6, 6),)


@model
def class_token_and_positions(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        return s.l(torch.cat([s.cls.expand(x.size(0), -1, -1), x], 1) + s.pos).tanh()

    net = Fn(f, cls=par(1, 1, 5), pos=par(1, 7, 5), l=nn.Linear(5, 3))
    return net, (torch.randn(n, 6, 5),)


@model
def siamese_concat(n: int) -> Case:
    def f(s: Any, a: Tensor, b: Tensor) -> Tensor:
        u, v = s.l(torch.cat([a, b])).chunk(2)
        return u * v

    return Fn(f, l=nn.Linear(5, 4)), (torch.randn(n, 5), torch.randn(n, 5))


@model
def experts_index_add(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        h = x.reshape(-1, 5)
        gate = s.gate(h).softmax(-1)
        out = torch.zeros_like(h)
        for e, expert in enumerate(s.experts):
            rows = torch.where(gate.argmax(-1) == e)[0]
            out.index_add_(0, rows, expert(h[rows]) * gate[rows, e, None])
        return s.head(out.view_as(x))

    experts = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
    return Fn(f, gate=nn.Linear(5, 3), experts=experts, head=nn.Linear(5, 2)), (
        torch.randn(n, 4, 5),
    )


@model
def buffer_written_in_a_loop(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        out = x.new_zeros(x.size(0), 3, 5)
        for k in range(3):
            out[:, k] = s.l(x[:, k])
        return out.tanh()

    return Fn(f, l=nn.Linear(5, 5)), (torch.randn(n, 3, 5),)


@model
def inplace_bias(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        h = s.l(x)
        h += s.b
        h.mul_(s.g)
        return h

    return Fn(f, l=nn.Linear(5, 4, bias=False), b=par(4), g=par(4)), (torch.randn(n, 5),)


@model
def parameter_over_the_batch(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        return (x + s.w.expand(x.size(0), -1)) * s.g.repeat(x.size(0), 1)

    return Fn(f, w=par(5), g=par(1, 5)), (torch.randn(n, 5),)


@model
def attention(n: int) -> Case:
    net = Fn(lambda s, x: s.m(x, x, x)[0], m=nn.MultiheadAttention(8, 2, batch_first=True))
    return net, (torch.randn(n, n or 2, 8),)


@model
def transformer_layer(n: int) -> Case:
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return net, (torch.randn(n, n or 2, 8),)


@model
def lstm(n: int) -> Case:
    return nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True), (torch.randn(n, 4, 5),)


@model
def gru_time_first(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        return s.r(x.transpose(0, 1))[0].transpose(0, 1)

    return Fn(f, r=nn.GRU(5, 6)), (torch.randn(n, n or 2, 5),)


@model
def packed_lstm(n: int) -> Case:
    def f(s: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(s.r(packed)[0], batch_first=True, total_length=5)[0]

    lengths = torch.tensor([3, 5, 2, 4, 1])[:n]
    return Fn(f, r=nn.LSTM(5, 6, batch_first=True)), (torch.randn(n, 5, 5), lengths)


@model
def gru_packed_both_ways(n: int) -> Case:
    def f(s: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, last = s.r(packed)
        padded = pad_packed_sequence(out, batch_first=True, total_length=5)[0]
        return torch.cat([padded.flatten(1), last.transpose(0, 1).flatten(1)], 1)

    lengths = torch.tensor([3, 5, 2, 4, 1])[:n]
    net = Fn(f, r=nn.GRU(5, 4, 2, batch_first=True, bidirectional=True))
    return net, (torch.randn(n, 5, 5), lengths)


@model
def rnn_with_initial_state(n: int) -> Case:
    def f(s: Any, x: Tensor, h: Tensor) -> Tensor:
        out, last = s.r(x.transpose(0, 1), h.transpose(0, 1).contiguous())
        return torch.cat([out.transpose(0, 1).flatten(1), last.transpose(0, 1).flatten(1)], 1)

    net = Fn(f, r=nn.RNN(5, 4, 2, nonlinearity="relu", bias=False))
    return net, (torch.randn(n, n or 2, 5), torch.randn(n, 2, 4))


@model
def rnn_learned_state(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        return s.r(x, s.h.expand(-1, x.size(0), -1).contiguous())[0]

    return Fn(f, r=nn.RNN(5, 4, batch_first=True), h=par(1, 1, 4)), (torch.randn(n, 3, 5),)


@model
def lstm_projected(n: int) -> Case:
    return nn.LSTM(5, 6, proj_size=3, batch_first=True), (torch.randn(n, 4, 5),)


@model
def lstm_frozen_hidden(n: int) -> Case:
    net = nn.LSTM(5, 6, batch_first=True)
    net.weight_hh_l0.requires_grad_(False)
    net.bias_ih_l0.requires_grad_(False)
    return net, (torch.randn(n, 4, 5),)


@model
def gru_reused(n: int) -> Case:
    net = Fn(lambda s, x: s.r(s.r(x)[0].tanh())[0], r=nn.GRU(5, 5, batch_first=True))
    return net, (torch.randn(n, 4, 5),)


@model
def experts_of_few_samples(n: int) -> Case:
    def f(s: Any, x: Tensor, route: Tensor) -> Tensor:
        h = x.reshape(-1, 5)
        out = torch.zeros_like(h)
        owner = route.repeat_interleave(x.shape[1])
        for e, expert in enumerate(s.experts):  # each expert sees rows of some samples only
            rows = torch.where(owner == e)[0]
            out.index_add_(0, rows, expert(h[rows]))
        return s.head(out.view_as(x))

    experts = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
    net = Fn(f, experts=experts, head=nn.Linear(5, 2))
    return net, (torch.randn(n, 3, 5), torch.tensor([2, 0, 2, 1, 3])[:n])


@model
def picture_tokens(n: int) -> Case:
    def f(s: Any, ids: Tensor, image: Tensor) -> Tensor:
        h = s.e(ids)
        mask = (ids == 0).unsqueeze(-1).expand_as(h)
        return s.l(h.masked_scatter(mask, s.p(image).reshape(-1, 5)))

    ids = torch.randint(1, 9, (n, 6))
    ids[:, 1:3] = 0
    net = Fn(f, e=nn.Embedding(9, 5), p=nn.Linear(4, 10), l=nn.Linear(5, 3))
    return net, (ids, torch.randn(n, 4))


@model
def written_through_views(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        k = x.new_empty(x.size(0), 3, 6)
        k[..., :4].copy_(s.a(x))
        k[..., 4:].copy_(s.b(x))
        return k.tanh()

    return Fn(f, a=nn.Linear(5, 4), b=nn.Linear(5, 2)), (torch.randn(n, 3, 5),)


@model
def bilinear(n: int) -> Case:
    net = Fn(lambda s, a, b: s.l(a, b), l=nn.Bilinear(3, 4, 2))
    return net, (torch.randn(n, 3), torch.randn(n, 4))


@model
def prelu(n: int) -> Case:
    return nn.Sequential(nn.Linear(5, 4), nn.PReLU(4)), (torch.randn(n, 5),)


@model
def rmsnorm(n: int) -> Case:
    return nn.RMSNorm(5), (torch.randn(n, 3, 5),)


@model
def lstm_cell(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        state = None
        for k in range(x.size(1)):
            state = s.c(x[:, k], state)
        return state[0]

    return Fn(f, c=nn.LSTMCell(5, 4)), (torch.randn(n, 3, 5),)


@model
def complex_parameter(n: int) -> Case:
    net = Fn(lambda s, x: (x @ s.w) * s.b, w=nn.Parameter(torch.randn(5, 3, dtype=torch.cdouble)),
             b=nn.Parameter(torch.randn(3, dtype=torch.cdouble)))  # fmt: skip
    return net, (torch.randn(n, 5, dtype=torch.cdouble),)


@model
def checkpointed(n: int) -> Case:
    net = Fn(
        lambda s, x: checkpoint(s.b, s.a(x), use_reentrant=False),
        a=nn.Linear(5, 5), b=nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)),
    )  # fmt: skip
    return net, (torch.randn(n, 5),)


@model
def checkpointed_reentrant(n: int) -> Case:
    net = Fn(
        lambda s, x: checkpoint(s.b, s.a(x), use_reentrant=True),
        a=nn.Linear(5, 5), b=nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)),
    )  # fmt: skip
    return net, (torch.randn(n, 5),)


def _slope(value: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(value, x, torch.ones_like(value), create_graph=True)[0]


@model
def energy_and_forces(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = s.b(torch.tanh(s.a(x)))
        return torch.cat([energy, _slope(energy, x)], 1)

    return Fn(f, a=nn.Linear(5, 4), b=nn.Linear(4, 1)), (torch.randn(n, 5),)


@model
def hamiltonian_of_a_convolution(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        q, p = _slope(s.b(s.a(x.unsqueeze(1)).tanh().flatten(1)), x).chunk(2, 1)
        return torch.cat([p, -q], 1)

    return Fn(f, a=nn.Conv1d(1, 2, 3), b=nn.Linear(8, 1)), (torch.randn(n, 6),)


@model
def second_derivatives(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        first = _slope(s.c(torch.tanh(s.b(torch.tanh(s.a(x))))), x)
        return first + _slope(first[:, 0], x)

    parts = {"a": nn.Linear(5, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 1)}
    return Fn(f, **parts), (torch.randn(n, 5),)


@model
def unused_and_frozen(n: int) -> Case:
    net = Fn(lambda s, x: s.a(x), a=nn.Linear(5, 3), unused=nn.Linear(2, 2))
    net.a.bias.requires_grad_(False)
    return net, (torch.randn(n, 5),)


@model
def no_grad_segment(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = s.a(x)
        return s.b(h)

    return Fn(f, a=nn.Linear(5, 5), b=nn.Linear(5, 2)), (torch.randn(n, 5),)


@model
def householder_reflections_of_matrices(n: int) -> Case:
    net = Fn(
        lambda s, x: torch.ormqr(
            s.a(x).view(-1, 3, 2), s.tau(x), s.other(x).view(-1, 3, 2)
        ).flatten(1),
        a=nn.Linear(5, 6),
        tau=nn.Linear(5, 2),
        other=nn.Linear(5, 6),
    )
    return net, (torch.randn(n, 5),)


@model
def sequences_without_positions(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        rows = s.a(x).reshape(-1, 3)
        return s.bias + s.b(rows.tanh()).view(len(x), 0, 3).flatten(1).sum(1, keepdim=True)

    return Fn(f, a=nn.Linear(5, 3), b=nn.Linear(3, 3), bias=par(3)), (torch.randn(n, 0, 5),)
