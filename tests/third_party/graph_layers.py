"""More layers of graph networks: norms, global attention, dense poolings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Fn

from .graphs import subject
from .subject import Subject, Table

TABLE = Table("layers of graphs")
pyg = TABLE.package("torch-geometric", "torch_geometric")


def _pooled(s: Any, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
    """A layer, which may take edges or the batch vector, and the mean of each graph."""
    from torch_geometric.nn import global_mean_pool

    given = {"e": (edges,), "b": (batch,), "eb": (edges, batch), "xe": (x, edges), "": ()}[s.takes]
    out = s.layer(torch.relu(s.first(x)), *given)
    out = out[0] if isinstance(out, tuple) else out
    return s.head(global_mean_pool(out, batch) if len(out) == len(x) else out)


def _layer(make: Any, takes: str) -> Subject:
    model = Fn(_pooled, first=nn.Linear(6, 6), layer=make(), head=nn.LazyLinear(3))
    model.takes = takes
    made = subject(model, "x", "edge_index", "batch")
    model(*(made.batch[name] for name in ("x", "edge_index", "batch")))
    return made


def add(name: str, takes: str, make: Any) -> None:
    """A layer with all it needs of a graph: edges (e), the batch vector (b)."""
    pyg(name, make, takes)(_layer)


def _nn() -> Any:
    import torch_geometric.nn

    return torch_geometric.nn


add("GPSConv", "eb", lambda: _nn().GPSConv(6, _nn().GCNConv(6, 6), heads=2, norm="layer_norm"))
add("GPSConv, graph norm", "eb", lambda: _nn().GPSConv(6, None, heads=1, norm="graph_norm"))
add("GraphNorm", "b", lambda: _nn().GraphNorm(6))
add("InstanceNorm", "b", lambda: _nn().InstanceNorm(6, affine=True))
add("LayerNorm of each graph", "b", lambda: _nn().LayerNorm(6))
add("PairNorm", "b", lambda: _nn().PairNorm())
add("GraphSizeNorm", "b", lambda: _nn().GraphSizeNorm())
add("MeanSubtractionNorm", "b", lambda: _nn().MeanSubtractionNorm())
add("GCN2Conv", "xe", lambda: _nn().GCN2Conv(6, 0.1))
add("FAConv", "xe", lambda: _nn().FAConv(6))
add("APPNP", "e", lambda: _nn().APPNP(3, 0.1))
add("AGNNConv", "e", lambda: _nn().AGNNConv())
add("SSGConv", "e", lambda: _nn().SSGConv(6, 6, 0.1))
add("AntiSymmetricConv", "e", lambda: _nn().AntiSymmetricConv(6, num_iters=2))
add("DirGNNConv", "e", lambda: _nn().DirGNNConv(_nn().SAGEConv(6, 6)))
add("MixHopConv", "e", lambda: _nn().MixHopConv(6, 6, [0, 1, 2]))
add("GCN, jumping knowledge", "e", lambda: _nn().GCN(6, 8, 2, jk="lstm"))
add("multiset transformer", "b", lambda: _nn().aggr.GraphMultisetTransformer(6, 2, heads=2))
add("several aggregations", "b",
    lambda: _nn().aggr.MultiAggregation(["mean", "max", "std", "median"]))  # fmt: skip
add("variance preserving", "b", lambda: _nn().aggr.VariancePreservingAggregation())


@pyg("cluster pooling")
def clusters() -> Subject:
    from torch_geometric.nn import ClusterPooling, global_mean_pool

    def f(s: Any, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        x, edges, batch, _ = s.pool(s.first(x), edges, batch)
        return s.head(global_mean_pool(x, batch))

    model = Fn(f, first=nn.Linear(6, 6), pool=ClusterPooling(6), head=nn.Linear(6, 3))
    return subject(model, "x", "edge_index", "batch")


def _dense(s: Any, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
    """Nodes are assigned to clusters, in dense matrices."""
    from torch_geometric import nn, utils

    (x, mask), adjacency = utils.to_dense_batch(x, batch), utils.to_dense_adj(edges, batch)
    out = getattr(nn, s.name)(s.first(x), adjacency, s.assign(x), mask)[0]
    return s.head(out.mean(1))


@pyg("dense differentiable pooling", "dense_diff_pool")
@pyg("dense mincut pooling", "dense_mincut_pool")
def dense(name: str) -> Subject:
    model = Fn(_dense, first=nn.Linear(6, 6), assign=nn.Linear(6, 3), head=nn.Linear(6, 3))
    model.name = name
    return subject(model, "x", "edge_index", "batch")


@pyg("AttentiveFP")
def attentive() -> Subject:
    from torch_geometric.nn import AttentiveFP

    return subject(AttentiveFP(6, 8, 4, 3, 2, 2), "x", "edge_index", "edge_attr", "batch")


@pyg("PNAConv, towers and edges")
def towers() -> Subject:
    from torch_geometric.nn import PNAConv, global_mean_pool

    degrees = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    conv = PNAConv(6, 6, ["mean", "max", "std"], ["identity", "amplification"], degrees,
                   edge_dim=3, towers=2)  # fmt: skip

    def f(s: Any, x: Tensor, edges: Tensor, features: Tensor, batch: Tensor) -> Tensor:
        return global_mean_pool(s.conv(x, edges, features), batch)

    return subject(Fn(f, conv=conv), "x", "edge_index", "edge_attr", "batch")
