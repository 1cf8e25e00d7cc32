"""Networks for tables and recommenders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .subject import N, Subject, Table, squares

TABLE = Table("tabular and recommenders")
tabnet = TABLE.package("pytorch-tabnet", "pytorch_tabnet")
revisiting = TABLE.package("rtdl_revisiting_models")
numbers = TABLE.package("rtdl_num_embeddings")
lucid = TABLE.package("tab-transformer-pytorch")
deepctr = TABLE.package("deepctr-torch")


@tabnet("TabNet")
def tab_net() -> Subject:
    from pytorch_tabnet.tab_network import TabNet

    group = torch.eye(6)
    model = TabNet(6, 3, 4, 4, 2, virtual_batch_size=N, group_attention_matrix=group)
    return Subject(model, squares, torch.randn(N, 6))


@revisiting("MLP", "MLP")
@revisiting("ResNet", "ResNet")
def plain(name: str) -> Subject:
    import rtdl_revisiting_models as rtdl

    shapes = {
        "MLP": {"n_blocks": 2, "d_block": 8, "dropout": 0.1},
        "ResNet": {"n_blocks": 2, "d_block": 8, "d_hidden": 8, "d_hidden_multiplier": None,
                   "dropout1": 0.1, "dropout2": 0.0},
    }  # fmt: skip
    return Subject(getattr(rtdl, name)(d_in=6, d_out=3, **shapes[name]), squares, torch.randn(N, 6))


@revisiting("FTTransformer")
def ft_transformer() -> Subject:
    import rtdl_revisiting_models as rtdl

    model = rtdl.FTTransformer(
        n_cont_features=4, cat_cardinalities=[3, 5], d_out=2, n_blocks=2, d_block=8,
        attention_n_heads=2, attention_dropout=0.0, ffn_d_hidden=None,
        ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip
    return Subject(model, squares, (torch.randn(N, 4), torch.randint(0, 3, (N, 2))))


@numbers("PeriodicEmbeddings", "PeriodicEmbeddings", {"lite": False})
@numbers("PeriodicEmbeddings, lite", "PeriodicEmbeddings", {"lite": True})
@numbers("LinearReLUEmbeddings", "LinearReLUEmbeddings", {})
@numbers("PiecewiseLinearEmbeddings", "PiecewiseLinearEmbeddings", {})
def embedded(name: str, more: dict[str, Any]) -> Subject:
    import rtdl_num_embeddings as rtdl

    if name == "PiecewiseLinearEmbeddings":
        bins = [torch.linspace(-2, 2, 5) for _ in range(6)]
        first = rtdl.PiecewiseLinearEmbeddings(bins, 4, activation=True, version="B")
    else:
        first = getattr(rtdl, name)(6, 4, **more)
    model = nn.Sequential(first, nn.Flatten(), nn.Linear(24, 3))
    return Subject(model, squares, torch.randn(N, 6))


@lucid("TabTransformer", "TabTransformer")
@lucid("FTTransformer", "FTTransformer")
def tab_transformer(name: str) -> Subject:
    import tab_transformer_pytorch as tab

    kind = getattr(tab, name)
    more = {"mlp_act": nn.ReLU()} if name == "TabTransformer" else {}
    model = kind(
        categories=(3, 5, 4), num_continuous=4, dim=8, dim_out=2, depth=2, heads=2, dim_head=4,
        attn_dropout=0.0, ff_dropout=0.0, **more,
    )  # fmt: skip
    return Subject(model, squares, (torch.randint(0, 3, (N, 3)), torch.randn(N, 4)))


DEEPCTR = (
    "DeepFM", "WDL", "xDeepFM", "DCN", "AutoInt", "NFM", "AFM", "FiBiNET", "PNN", "CCPM",
    "IFM", "DIFM", "ONN",
)  # fmt: skip


def ctr(name: str) -> Subject:
    import deepctr_torch.models as models
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    columns = [SparseFeat(f"c{k}", 5, embedding_dim=4) for k in range(3)]
    if name not in ("AFM", "CCPM"):
        columns += [DenseFeat(f"d{k}", 1) for k in range(2)]
    width = len(columns)
    kind = getattr(models, name)
    if name == "PNN":
        model = kind(columns, dnn_hidden_units=(8, 4), use_outter=True)
    elif name == "AFM":
        model = kind(columns, columns)
    else:
        model = kind(columns, columns, dnn_hidden_units=(8, 4))
    codes = torch.randint(0, 5, (N, 3)).to(torch.get_default_dtype())
    batch = torch.cat([codes, torch.randn(N, width - 3)], 1)
    return Subject(model, ctr_loss, batch)


def ctr_loss(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x).flatten()
    target = (x[:, 0] > 2).to(found.dtype)
    return nn.functional.binary_cross_entropy(found, target, reduction="none")


for _name in DEEPCTR:
    deepctr(_name, _name)(ctr)
