"""Models that the original gets wrong, crashes on or refuses, one trait each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from ..models import Case, Fn, par

N = 4
HERE: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    HERE[build.__name__] = build
    return build


# ---------------------------------------------------------------- silently wrong in the original


@case
def embedding_padding() -> Case:
    net = nn.Embedding(6, 3, padding_idx=2)
    nn.init.normal_(net.weight)  # else the row is zero, and so is the gradient of its square
    return net, (torch.tensor([[2, 1], [2, 2], [0, 2], [5, 4]]),)


@case
def embedding_scaled_by_frequency() -> Case:
    net = nn.Embedding(6, 3, scale_grad_by_freq=True)
    return net, (torch.tensor([[1, 1, 2], [2, 2, 2], [0, 1, 2], [5, 5, 1]]),)


@case
def complex_linear() -> Case:
    net = nn.Linear(5, 3, dtype=torch.complex128)
    return net, (torch.randn(N, 2, 5, dtype=torch.complex128),)


@case
def complex_convolution() -> Case:
    net = nn.Conv2d(2, 3, 2, dtype=torch.complex128)
    return net, (torch.randn(N, 2, 4, 4, dtype=torch.complex128),)


@case
def instance_norm_with_running_statistics_in_eval() -> Case:
    net = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    net(torch.randn(8, 3, 5, 5) * 2 + 1)
    return net.eval(), (torch.randn(N, 3, 4, 4),)


@case
def transposed_tokens_when_t_equals_n() -> Case:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.after(s.layer(x.transpose(0, 1)).tanh().transpose(0, 1))

    return Fn(forward, layer=nn.Linear(5, 6), after=nn.Linear(6, 2)), (torch.randn(N, N, 5),)


@case
def two_branches_that_share_a_bias_buffer() -> Case:
    net = Fn(lambda s, x: s.a(x) + s.b(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3))
    return net, (torch.randn(N, 5),)


def _checkpointed(reentrant: bool) -> Case:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.first(x)
        return s.last(checkpoint(lambda h: s.inner(h).tanh(), h, use_reentrant=reentrant))

    layers = {name: nn.Linear(4, 4) for name in ("first", "inner", "last")}
    return Fn(forward, **layers), (torch.randn(N, 4),)


@case
def checkpointed() -> Case:
    return _checkpointed(False)


@case
def checkpointed_reentrant() -> Case:
    return _checkpointed(True)


# ---------------------------------------------------------------- crashes in the original


@case
def convolution_channels_last() -> Case:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2))
    x = torch.randn(N, 3, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last)
    return net.to(memory_format=torch.channels_last), (x,)


@case
def patch_embedding() -> Case:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head(s.patch(x).flatten(2).transpose(1, 2))

    net = Fn(forward, patch=nn.Conv2d(3, 6, 2, stride=2), head=nn.Linear(6, 3))
    return net, (torch.randn(N, 3, 4, 4),)


@case
def permuted_convolution() -> Case:
    net = Fn(lambda s, x: s.conv(x).permute(0, 2, 3, 1).tanh(), conv=nn.Conv2d(2, 3, 2))
    return net, (torch.randn(N, 2, 4, 4),)


@case
def convolution_3d_dilated_in_groups() -> Case:
    return nn.Conv3d(4, 4, 2, dilation=2, groups=2), (torch.randn(N, 4, 4, 4, 4),)


@case
def convolution_3d_dilated_for_many() -> Case:
    return nn.Conv3d(1, 2, 2, dilation=2), (torch.randn(33, 1, 3, 3, 3),)


@case
def list_and_tuple_arguments_shuffled() -> Case:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.conv2d(x, bias=s.b, dilation=[1], stride=(2,), weight=s.w, padding=[1, 1])
        return F.conv2d(groups=1, weight=s.v, input=h, padding="same")

    return Fn(forward, w=par(4, 3, 3, 3), b=par(4), v=par(2, 4, 3, 3)), (torch.randn(N, 3, 5, 5),)


@case
def group_norm_with_frozen_bias() -> Case:
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.GroupNorm(2, 4))
    net[1].bias.requires_grad_(False)
    return net, (torch.randn(N, 3, 4, 4),)


@case
def group_norm_without_bias() -> Case:
    return Fn(lambda s, x: F.group_norm(x, 2, s.w), w=par(4)), (torch.randn(N, 4, 3, 3),)


@case
def group_norm_channels_last_first_layer() -> Case:
    x = torch.randn(N, 4, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    return nn.GroupNorm(2, 4), (x,)


@case
def positions_of_one_row() -> Case:
    def forward(s: Any, x: Tensor, ids: Tensor) -> Tensor:
        return s.head(s.words(x) + s.places(ids))

    net = Fn(forward, words=nn.Embedding(7, 4), places=nn.Embedding(5, 4), head=nn.Linear(4, 2))
    return net, (torch.randint(7, (N, 5)), torch.arange(5).unsqueeze(0))


@case
def positions_of_rank_one() -> Case:
    net, (x, ids) = positions_of_one_row()
    return net, (x, ids[0])


@case
def flattened_tokens_then_linear() -> Case:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.layer(x.reshape(-1, x.shape[-1])).tanh().reshape(*x.shape[:2], -1)

    return Fn(forward, layer=nn.Linear(5, 3)), (torch.randn(N, 6, 5),)


@case
def siamese_concatenation() -> Case:
    def forward(s: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = s.body(torch.cat([x, y])).tanh().chunk(2)
        return a * b

    return Fn(forward, body=nn.Linear(5, 3)), (torch.randn(N, 5), torch.randn(N, 5))


@case
def shared_mask_and_scalar() -> Case:
    def forward(s: Any, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        scores = (s.q(x) @ s.k(x).transpose(1, 2) * scale).masked_fill(mask, -1e9)
        return scores.softmax(-1) @ x

    net = Fn(forward, q=nn.Linear(5, 5), k=nn.Linear(5, 5))
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return net, (torch.randn(N, 6, 5), mask, torch.tensor(0.5))


# ---------------------------------------------------------------- refused by the original


@case
def attention() -> Case:
    net = Fn(lambda s, x: s.a(x, x, x)[0], a=nn.MultiheadAttention(6, 2, batch_first=True))
    return net, (torch.randn(N, 5, 6),)


@case
def transformer_layers() -> Case:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(N, 5, 6),)


@case
def transposed_convolution() -> Case:
    return nn.ConvTranspose1d(3, 4, 3, stride=2), (torch.randn(N, 3, 5),)


@case
def embedding_bag() -> Case:
    return nn.EmbeddingBag(7, 3, mode="mean"), (torch.randint(7, (N, 5)),)


@case
def bilinear() -> Case:
    return nn.Bilinear(3, 4, 2), (torch.randn(N, 3), torch.randn(N, 4))


@case
def prelu_and_rms_norm() -> Case:
    return nn.Sequential(nn.Linear(5, 6), nn.PReLU(6), nn.RMSNorm(6)), (torch.randn(N, 5),)


@case
def batch_norm_in_eval() -> Case:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)).eval(), (torch.randn(N, 5),)


def _cell(cell: nn.Module) -> Case:
    def forward(s: Any, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = s.cell(step, state)
        return state[0] if isinstance(state, tuple) else state

    return Fn(forward, cell=cell), (torch.randn(N, 3, 5),)


@case
def rnn_cell() -> Case:
    return _cell(nn.RNNCell(5, 4))


@case
def lstm_cell() -> Case:
    return _cell(nn.LSTMCell(5, 4))


@case
def gru_cell() -> Case:
    return _cell(nn.GRUCell(5, 4))


@case
def products() -> Case:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.addmm(s.b, x, s.w.t()) @ s.v
        h = torch.einsum("ni,ij->nj", h, s.u).unsqueeze(1)
        return torch.bmm(h, s.z.expand(len(x), -1, -1)) * s.g + s.g[:1]

    weights = {"w": par(4, 5), "b": par(4), "v": par(4, 3), "u": par(3, 3), "g": par(2)}
    return Fn(forward, z=par(1, 3, 2), **weights), (torch.randn(N, 5),)


@case
def pieces_of_a_weight() -> Case:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.w.chunk(3)
        h = F.linear(x, q) + x @ k.t() + F.linear(x, v.reshape(5, 5).view(-1, 5))
        return h * s.w[0] + s.w[7:8].expand(x.shape[0], -1)

    return Fn(forward, w=par(15, 5)), (torch.randn(N, 5),)


@case
def weight_norm() -> Case:
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 2))
    return net, (torch.randn(N, 5),)


@case
def spectral_norm() -> Case:
    return parametrizations.spectral_norm(nn.Linear(5, 6)).eval(), (torch.randn(N, 5),)


@case
def orthogonal() -> Case:
    return parametrizations.orthogonal(nn.Linear(5, 5)), (torch.randn(N, 5),)


@case
def pruned() -> Case:
    return prune.l1_unstructured(nn.Linear(5, 6), "weight", 0.5), (torch.randn(N, 5),)


@case
def lora_as_a_sum() -> Case:
    net = Fn(
        lambda s, x: F.linear(x, s.w + s.b @ s.a).tanh(), w=par(6, 5), b=par(6, 2), a=par(2, 5)
    )
    net.w.requires_grad_(False)
    return net, (torch.randn(N, 5),)


@case
def looks_at_its_weight() -> Case:
    def forward(s: Any, x: Tensor) -> Tensor:
        assert s.w.requires_grad
        return F.linear(x, s.w) * s.w.size(0) / s.w.dim()

    return Fn(forward, w=par(3, 5)), (torch.randn(N, 5),)
