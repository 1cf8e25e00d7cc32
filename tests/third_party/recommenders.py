"""Recommenders, calibrated layers, tensor factorizations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Fn

from .subject import N, Subject, Table, squares

TABLE = Table("recommenders and structured layers")
rechub = TABLE.package("torch-rechub", "torch_rechub")
recbole = TABLE.package("recbole")
lattice = TABLE.package("pytorch-lattice", "pytorch_lattice")
tensors = TABLE.package("tensorly-torch", "tltorch")
ordinal = TABLE.package("coral-pytorch", "coral_pytorch")
MLP = {"dims": [8, 4], "dropout": 0.0, "activation": "relu"}


def _features() -> tuple[list[Any], list[Any]]:
    from torch_rechub.basic.features import DenseFeature, SparseFeature

    return (
        [SparseFeature(f"c{k}", 5, embed_dim=4) for k in range(3)],
        [DenseFeature(f"d{k}") for k in range(2)],
    )


def _columns() -> dict[str, Tensor]:
    codes = {f"c{k}": torch.randint(0, 5, (N,)) for k in range(3)}
    return {**codes, **{f"d{k}": torch.randn(N) for k in range(2)}}


def _one(model: nn.Module, batch: Any) -> Tensor:
    """One output per sample, or several columns."""
    out = model(batch)
    return (out - 0.3).reshape(len(out), -1).square().mean(1)


@rechub("DeepFM", "DeepFM", "deep_features", "fm_features")
@rechub("WideDeep", "WideDeep", "wide_features", "deep_features")
@rechub("DCN", "DCN", "features", n_cross_layers=2)
@rechub("EDCN", "EDCN", "features", n_cross_layers=2)
@rechub("FiBiNet", "FiBiNet", "features")
@rechub("AFM", "AFM", "fm_features", embed_dim=4)
@rechub("AutoInt", "AutoInt", "sparse_features", num_layers=1)
def ranking(name: str, *given: str, **more: Any) -> Subject:
    import torch_rechub.models.ranking as ranking

    sparse, dense = _features()
    arguments: dict[str, Any] = dict.fromkeys(given, sparse) | more
    if name in ("AutoInt", "AFM"):
        arguments |= {"dense_features": dense} if name == "AutoInt" else {}
    if name != "AFM":
        arguments["mlp_params"] = MLP
    return Subject(getattr(ranking, name)(**arguments), _one, _columns())


@rechub("MMOE", "MMOE", n_expert=2, expert_params={"dims": [8]})
@rechub("SharedBottom", "SharedBottom", bottom_params={"dims": [8]})
@rechub("PLE", "PLE", n_level=1, n_expert_specific=1, n_expert_shared=1,
        expert_params={"dims": [8]})  # fmt: skip
def tasks(name: str, **more: Any) -> Subject:
    import torch_rechub.models.multi_task as multi

    sparse, dense = _features()
    towers = [{"dims": [4]}, {"dims": [4]}]
    kinds = ["classification", "regression"]
    model = getattr(multi, name)(sparse + dense, kinds, tower_params_list=towers, **more)
    return Subject(model, _one, _columns())


@recbole("transformer over items")
def items() -> Subject:
    from recbole.model.layers import TransformerEncoder

    net = TransformerEncoder(1, 2, 8, 16, 0.0, 0.0)

    def f(s: Any, x: Tensor) -> Tensor:
        mask = (x != 0)[:, None, None].to(s.e.weight.dtype)
        return s.net(s.e(x), (1 - mask) * -1e4, output_all_encoded_layers=False)[-1][:, -1]

    model = Fn(f, e=nn.Embedding(10, 8, padding_idx=0), net=net)
    return Subject(model, squares, torch.randint(0, 10, (N, 6)))


@recbole("attention over a history of given lengths")
def history() -> Subject:
    from recbole.model.layers import SequenceAttLayer

    net = SequenceAttLayer(torch.arange(5).view(1, -1), (32, 8), "sigmoid", False, False)

    def f(s: Any, query: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
        return s.net(query, keys, lengths).squeeze(1)

    batch = (torch.randn(N, 8), torch.randn(N, 5, 8), torch.tensor([5, 2, 1, 4]))
    return Subject(Fn(f, net=net), squares, batch)


@recbole("interests of items")
def interests() -> Subject:
    from recbole.model.layers import ItemToInterestAggregation

    return Subject(ItemToInterestAggregation(6, 8, 3), squares, torch.randn(N, 6, 8))


@lattice("calibrated lattice", "hypercube")
@lattice("calibrated lattice, simplex", "simplex")
def calibrated(kind: str) -> Subject:
    import numpy
    from pytorch_lattice.enums import Interpolation
    from pytorch_lattice.layers import CategoricalCalibrator, Lattice, NumericalCalibrator

    points = numpy.linspace(-2, 2, 5)

    def f(s: Any, x: Tensor, code: Tensor) -> Tensor:
        cells = [s.first(x[:, :1]), s.second(x[:, 1:]), s.third(code)]
        return s.net(torch.cat(cells, 1).to(x.dtype))

    model = Fn(
        f, first=NumericalCalibrator(points, output_min=0.0, output_max=1.0),
        second=NumericalCalibrator(points, output_min=0.0, output_max=2.0),
        third=CategoricalCalibrator(3, output_min=0.0, output_max=1.0),
        net=Lattice([2, 3, 2], interpolation=Interpolation(kind)),
    )  # fmt: skip
    return Subject(model, squares, (torch.randn(N, 2), torch.randint(0, 3, (N, 1)).double()))


@tensors("factorized linear, CP", "cp")
@tensors("factorized linear, Tucker", "tucker")
@tensors("factorized linear, tensor train", "blocktt")
def factorized(kind: str) -> Subject:
    import tltorch

    first = tltorch.FactorizedLinear((2, 3), (2, 4), factorization=kind, rank=3)
    for parameter in first.parameters():
        nn.init.normal_(parameter, std=0.3)
    return Subject(nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3)), squares, torch.randn(N, 6))


@tensors("tensor regression", "cp")
@tensors("tensor regression, Tucker", "tucker")
def regression(kind: str) -> Subject:
    import tltorch

    net = tltorch.TRL((3, 4), (2,), factorization=kind, rank=2, bias=True)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    return Subject(Fn(lambda s, x: s.net(s.l(x)), net=net, l=nn.Linear(4, 4)), squares,
                   torch.randn(N, 3, 4))  # fmt: skip


@ordinal("ordinal regression")
def coral() -> Subject:
    from coral_pytorch.layers import CoralLayer
    from coral_pytorch.losses import coral_loss

    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), CoralLayer(8, 4))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, levels = batch
        return coral_loss(model(x), levels, reduction=None)

    levels = (torch.randint(0, 4, (N, 1)) > torch.arange(3)).to(torch.get_default_dtype())
    return Subject(model, loss, (torch.randn(N, 5), levels))
