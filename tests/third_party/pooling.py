"""Poolings of graphs that keep some nodes, one after the other, and what comes after them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .graphs import subject
from .subject import Subject, Table

TABLE = Table("poolings of graphs")
pyg = TABLE.package("torch-geometric", "torch_geometric")


class Hierarchy(nn.Module):
    """Convolution and pooling, twice."""

    def __init__(self, make: Any) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.first, self.second = GCNConv(6, 8), GCNConv(8, 8)
        self.before, self.after, self.head = make(8), make(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        found = []
        for layer, pool in ((self.first, self.before), (self.second, self.after)):
            out = pool(layer(x, edge_index).relu(), edge_index, batch=batch)
            x, edge_index, batch = out[0], out[1], out[2] if len(out) == 4 else out[3]
            found.append(global_mean_pool(x, batch))
        return self.head(found[0] + found[1])


@pyg("top-k pooling twice, a share", "TopKPooling", ratio=0.7)
@pyg("top-k pooling twice, two nodes", "TopKPooling", ratio=2)
@pyg("top-k pooling twice, by score", "TopKPooling", min_score=0.1)
@pyg("SAG pooling twice", "SAGPooling", ratio=0.6)
@pyg("SAG pooling twice, by score", "SAGPooling", min_score=0.1)
@pyg("edge pooling twice", "EdgePooling")
def hierarchy(name: str, **arguments: Any) -> Subject:
    from torch_geometric.nn import pool

    model = Hierarchy(lambda width: getattr(pool, name)(width, **arguments))
    return subject(model, "x", "edge_index", "batch")


class Kept(nn.Module):
    """Some of the nodes, and an aggregation of them."""

    def __init__(self, aggregation: nn.Module, width: int) -> None:
        from torch_geometric.nn import GCNConv, TopKPooling

        super().__init__()
        self.first, self.pool = GCNConv(6, 8), TopKPooling(8, 0.8)
        self.aggregation, self.head = aggregation, nn.Linear(width, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x, _, _, batch, *_ = self.pool(self.first(x, edge_index).relu(), edge_index, batch=batch)
        out = self.aggregation(x, batch)
        return self.head(out if out.dim() == 2 else out.mean(1))


@pyg("top-k, then a set transformer", "SetTransformerAggregation", 8, channels=8, heads=2)
@pyg("top-k, then a multiset transformer", "GraphMultisetTransformer", 8, channels=8, k=2, heads=2)
@pyg("top-k, then softmax", "SoftmaxAggregation", 8, learn=True)
@pyg("top-k, then the maximum", "MaxAggregation", 8)
@pyg("top-k, then the deviation", "StdAggregation", 8)
@pyg("top-k, then the median", "MedianAggregation", 8)
def kept(name: str, width: int, **arguments: Any) -> Subject:
    from torch_geometric.nn import aggr

    return subject(Kept(getattr(aggr, name)(**arguments), width), "x", "edge_index", "batch")


@pyg("top-k, then a memory")
def memory() -> Subject:
    from torch_geometric.nn import MemPooling

    pool = MemPooling(8, 8, 2, 2)
    pool_only = nn.Module()
    pool_only.pool = pool
    pool_only.forward = lambda x, batch: pool(x, batch)[0]  # type: ignore[assignment]
    return subject(Kept(pool_only, 8), "x", "edge_index", "batch")


class Quantiles(nn.Module):
    """Quantiles over the nodes of each graph."""

    def __init__(self) -> None:
        from torch_geometric.nn import GCNConv, aggr

        super().__init__()
        self.first, self.head = GCNConv(6, 8), nn.Linear(16, 3)
        self.pool = aggr.QuantileAggregation([0.2, 0.7], interpolation="linear")

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.head(self.pool(self.first(x, edge_index), batch))


@pyg("quantiles")
def quantiles() -> Subject:
    return subject(Quantiles(), "x", "edge_index", "batch")


class Unet(nn.Module):
    """Down and up again."""

    def __init__(self) -> None:
        from torch_geometric.nn import GraphUNet

        super().__init__()
        self.net = GraphUNet(6, 8, 3, depth=2, pool_ratios=0.6)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        out = self.net(x, edge_index, batch)
        return torch.zeros(int(batch.max()) + 1, 3, dtype=x.dtype).index_add(0, batch, out)


@pyg("graph U-Net")
def unet() -> Subject:
    return subject(Unet(), "x", "edge_index", "batch")
