"""Ensembles in one model, forecasters, flows and equivariant networks of more packages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Fn

from .attention import SMALL, added, vectors
from .signals import _first, _image
from .subject import N, Subject, Table, first_tensor, squares

TABLE = Table("ensembles and forecasters")
add = added(TABLE)
uncertain = TABLE.package("torch-uncertainty")
forecasting = TABLE.package("pytorch-forecasting")
deepod = TABLE.package("deepod")

add("en-transformer", "en_transformer", "EnTransformer", vectors((5, 8), (5, 3)), dim=8, depth=1,
    heads=2, dim_head=32)  # fmt: skip
add("en-transformer", "en_transformer", "EnTransformer", vectors((5, 8), (5, 3)), dim=8, depth=1,
    neighbors=3, called="neighbours", heads=2, dim_head=32)  # fmt: skip
add("etsformer-pytorch", "etsformer_pytorch", "ETSFormer", vectors((16, 3)), model_dim=8,
    time_features=3, layers=1, heads=2, K=2)  # fmt: skip
add("segformer-pytorch", "segformer_pytorch", "Segformer", vectors((3, 32, 32)),
    dims=(4, 4, 8, 8), heads=(1, 1, 2, 2), ff_expansion=(2, 2, 2, 2), num_layers=1,
    decoder_dim=8)  # fmt: skip
add("nbeats-pytorch", "nbeats_pytorch.model", "NBeatsNet", vectors((10,)), nb_blocks_per_stack=1,
    hidden_layer_units=8)  # fmt: skip
add("rational-activations", "rational.torch", "Rational", vectors((6,)), cuda=False)
add("self-attention-cv", "self_attention_cv", "AxialAttentionBlock", vectors((4, 6, 6)),
    in_channels=4, dim=6, heads=2)  # fmt: skip
add("self-attention-cv", "self_attention_cv", "MultiHeadSelfAttention", vectors((5, 8)), dim=8,
    heads=2)  # fmt: skip
add("self-attention-cv", "self_attention_cv", "LinformerEncoder", vectors((6, 8)), dim=8, tokens=6,
    k=3, heads=2, blocks=1)  # fmt: skip


@TABLE.package("equiformer-pytorch")("equivariant transformer")
def equiformer() -> Subject:
    from equiformer_pytorch import Equiformer

    net = Equiformer(
        dim=(4, 4), heads=(2, 2), dim_head=(4, 4), depth=1, num_degrees=2, num_neighbors=3,
        valid_radius=10, radial_hidden_dim=8, reversible=False,
    )  # fmt: skip
    model = Fn(lambda s, *x: first_tensor([s.net(*x).type0]).flatten(1), net=net)
    return Subject(model, squares, (torch.randn(N, 5, 4), torch.randn(N, 5, 3)))


@TABLE.package("glasflow")("RealNVP", "RealNVP")
@TABLE.package("glasflow")("spline couplings", "CouplingNSF")
def couplings(name: str) -> Subject:
    import glasflow

    net = getattr(glasflow, name)(n_inputs=4, n_transforms=2, n_neurons=8)
    return Subject(Fn(lambda s, x: s.net.log_prob(x)[:, None], net=net), squares,
                   0.5 * torch.randn(N, 4))  # fmt: skip


@TABLE.package("x-clip")("text transformer")
def text() -> Subject:
    from x_clip.x_clip import TextTransformer

    net = TextTransformer(8, num_tokens=16, max_seq_len=6, depth=1, **SMALL)
    return _first(net, (torch.randint(0, 16, (N, 6)),))


# ---------------------------------------------------------------------- several models in one


@uncertain("batch ensemble")
def ensemble() -> Subject:
    from torch_uncertainty.layers import BatchLinear

    def f(s: Any, x: Tensor) -> Tensor:
        h = s.second(torch.relu(s.first(x.repeat(2, 1))))
        return h.unflatten(0, (2, -1)).transpose(0, 1).flatten(1)

    return Subject(Fn(f, first=BatchLinear(12, 8, 2), second=BatchLinear(8, 4, 2)), squares,
                   torch.randn(N, 12))  # fmt: skip


@uncertain("packed ensemble")
def packed() -> Subject:
    from torch_uncertainty.layers import PackedLinear

    first = PackedLinear(6, 8, alpha=2, num_estimators=2, gamma=1, first=True)
    second = PackedLinear(8, 4, alpha=2, num_estimators=2, gamma=1, last=True)

    def f(s: Any, x: Tensor) -> Tensor:
        h = s.second(torch.relu(s.first(x)))
        return h.unflatten(0, (2, -1)).transpose(0, 1).flatten(1)

    return Subject(Fn(f, first=first, second=second), squares, torch.randn(N, 6))


@uncertain("filter response norm")
def filtered() -> Subject:
    from torch_uncertainty.layers import FilterResponseNorm2d

    net = nn.Sequential(nn.Conv2d(3, 4, 3), FilterResponseNorm2d(4), nn.Flatten())
    return Subject(net, squares, _image(size=6))


# ---------------------------------------------------------------------- forecasters


@forecasting("interpretable attention")
def interpretable() -> Subject:
    from pytorch_forecasting.models.temporal_fusion_transformer import sub_modules

    net = sub_modules.InterpretableMultiHeadAttention(2, 8, dropout=0.0)
    model = Fn(lambda s, x: s.net(x, x, x)[0], net=net)
    return Subject(model, squares, torch.randn(N, 5, 8))


@forecasting("generic block")
def generic() -> Subject:
    from pytorch_forecasting.models.nbeats.sub_modules import NBEATSGenericBlock

    return _first(NBEATSGenericBlock(8, 4, backcast_length=6, forecast_length=3),
                  (torch.randn(N, 6),))  # fmt: skip


@deepod("convolutions, encoded and decoded", "TcnAE", n_features=3, n_hidden="8", n_emb=4)
@deepod("recurrent", "GRUNet", n_features=3, n_output=4)
def detectors(name: str, **more: Any) -> Subject:
    from deepod.core.networks import base_networks

    return _first(getattr(base_networks, name)(**more), (torch.randn(N, 8, 3),))
