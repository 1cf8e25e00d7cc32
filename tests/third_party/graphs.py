"""Graph networks: several graphs in one batch, nodes told apart by the batch vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .subject import N, Subject, Table, squares

TABLE = Table("graphs")
pyg = TABLE.package("torch-geometric", "torch_geometric")
SIZES = (3, 5, 4, 6)


def graph(size: int, features: int = 6) -> dict[str, Tensor]:
    """A ring with two chords, both ways."""
    ring = torch.arange(size)
    source = torch.cat([ring, ring[:1]])
    target = torch.cat([(ring + 1) % size, ring[2:3]])
    edges = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    return {
        "x": torch.randn(size, features),
        "edge_index": edges,
        "edge_attr": torch.rand(edges.shape[1], 3),
        "pos": torch.randn(size, 3),
        "z": torch.randint(1, 9, (size,)),
    }


def joined(graphs: Sequence[dict[str, Tensor]], rows: Sequence[int]) -> dict[str, Tensor]:
    """Graphs in one: node numbers are shifted, and ``batch`` says whose a node is."""
    chosen = [graphs[i] for i in rows]
    sizes = [len(g["x"]) for g in chosen]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    whole = {k: torch.cat([g[k] for g in chosen]) for k in ("x", "edge_attr", "pos", "z")}
    edges = [g["edge_index"] + start for g, start in zip(chosen, starts, strict=True)]
    whole["edge_index"] = torch.cat(edges, 1)
    whole["batch"] = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(sizes))
    return whole


def options(batch: dict[str, Tensor]) -> dict[str, Any]:
    """How a batch of graphs is recorded."""
    owner = batch["batch"]
    return {"n": int(owner.max()) + 1, "sample_ids": owner, "constants": ("batch",)}


def subject(model: nn.Module, *names: str, sizes: Sequence[int] = SIZES) -> Subject:
    """Graphs of which the model takes these fields."""
    graphs = [graph(size) for size in sizes]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return squares(model, tuple(batch[name] for name in names))

    def pick(rows: Sequence[int]) -> dict[str, Tensor]:
        return joined(graphs, rows)

    return Subject(model, loss, pick(range(N)), pick=pick, options=options)


class Pooled(nn.Module):
    """Two convolutions and a pooling over nodes."""

    def __init__(self, first: nn.Module, second: nn.Module, pool: Any, head: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.pool, self.head = first, second, pool, head

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = torch.relu(self.first(x, edge_index))
        return self.head(self.pool(self.second(x, edge_index), batch))


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "GCNConv": {}, "SAGEConv": {}, "GraphConv": {}, "GATConv": {"heads": 2, "concat": False},
    "GATv2Conv": {"heads": 2, "concat": False}, "TransformerConv": {"heads": 2, "concat": False},
    "TAGConv": {}, "ARMAConv": {}, "ChebConv": {"K": 2}, "LEConv": {}, "ClusterGCNConv": {},
    "GENConv": {}, "SGConv": {}, "FeaStConv": {"heads": 2}, "ResGatedGraphConv": {},
    "GeneralConv": {}, "EGConv": {"num_heads": 1, "num_bases": 2}, "SuperGATConv": {"heads": 1},
    "MFConv": {}, "HypergraphConv": {},
}  # fmt: skip


def _convolution(name: str, arguments: dict[str, Any]) -> Subject:
    from torch_geometric.nn import conv, pool

    kind = getattr(conv, name)
    first, second = kind(6, 8, **arguments), kind(8, 8, **arguments)
    return subject(
        Pooled(first, second, pool.global_mean_pool, nn.Linear(8, 3)), "x", "edge_index", "batch"
    )


for _name, _arguments in CONVOLUTIONS.items():
    pyg(_name, _name, _arguments)(_convolution)


class Attributed(Pooled):
    """The same with attributes of edges."""

    def forward(  # type: ignore[override]
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor
    ) -> Tensor:
        x = torch.relu(self.first(x, edge_index, edge_attr))
        return self.head(self.pool(self.second(x, edge_index, edge_attr), batch))


@pyg("GINEConv", "GINEConv", {})
@pyg("NNConv", "NNConv", {})
@pyg("CGConv", "CGConv", {"dim": 3})
@pyg("GMMConv", "GMMConv", {"dim": 3, "kernel_size": 2})
@pyg("TransformerConv with edges", "TransformerConv", {"edge_dim": 3})
@pyg("GATConv with edges", "GATConv", {"edge_dim": 3})
def attributed(name: str, arguments: dict[str, Any]) -> Subject:
    from torch_geometric.nn import conv, pool

    kind = getattr(conv, name)

    def make(i: int, o: int) -> nn.Module:
        if name == "GINEConv":
            return kind(nn.Sequential(nn.Linear(i, o), nn.ReLU()), edge_dim=3)
        if name == "NNConv":
            return kind(i, o, nn.Linear(3, i * o))
        if name == "CGConv":
            return kind(i, **arguments)
        return kind(i, o, **arguments)

    width = 6 if name == "CGConv" else 8
    model = Attributed(
        make(6, width), make(width, width), pool.global_add_pool, nn.Linear(width, 3)
    )
    return subject(model, "x", "edge_index", "edge_attr", "batch")


@pyg("GIN", "GIN")
@pyg("PNA", "PNA")
@pyg("EdgeCNN", "EdgeCNN")
@pyg("GraphSAGE", "GraphSAGE")
@pyg("GraphSAGE, layer norm over all graphs", "GraphSAGE", "layer")
@pyg("GAT", "GAT")
def basic(name: str, norm: str | None = None) -> Subject:
    from torch_geometric.nn import models, pool

    more: dict[str, Any] = {}
    if name == "PNA":
        more = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"],
                "deg": torch.tensor([0, 0, 4, 6, 2])}  # fmt: skip
    net = getattr(models, name)(6, 8, 2, norm=norm, jk="cat", **more)
    second = nn.Identity()
    second.forward = lambda x, edges: x  # type: ignore[assignment]
    model = Pooled(net, second, pool.global_add_pool, nn.Linear(8, 3))
    return subject(model, "x", "edge_index", "batch")


@pyg("Set2Set pooling", "Set2Set", 16)
@pyg("attentional pooling", "AttentionalAggregation", 8)
@pyg("softmax pooling", "SoftmaxAggregation", 8)
@pyg("power mean pooling", "PowerMeanAggregation", 8)
@pyg("median pooling", "MedianAggregation", 8)
@pyg("sort pooling", "SortAggregation", 16)
@pyg("LSTM pooling", "LSTMAggregation", 8)
@pyg("set transformer pooling", "SetTransformerAggregation", 8)
@pyg("deep sets pooling", "DeepSetsAggregation", 8)
@pyg("GRU pooling", "GRUAggregation", 8)
@pyg("equilibrium pooling", "EquilibriumAggregation", 4)
def aggregation(name: str, width: int) -> Subject:
    from torch_geometric.nn import aggr, conv

    kind = getattr(aggr, name)
    made = {
        "Set2Set": lambda: kind(8, 2), "AttentionalAggregation": lambda: kind(nn.Linear(8, 1)),
        "SoftmaxAggregation": lambda: kind(learn=True), "SortAggregation": lambda: kind(2),
        "PowerMeanAggregation": lambda: kind(learn=True), "MedianAggregation": kind,
        "LSTMAggregation": lambda: kind(8, 8), "GRUAggregation": lambda: kind(8, 8),
        "SetTransformerAggregation": lambda: kind(8, heads=2),
        "DeepSetsAggregation": lambda: kind(nn.Linear(8, 8), nn.Linear(8, 8)),
        "EquilibriumAggregation": lambda: kind(8, 4, [8], grad_iter=2),
    }[name]()  # fmt: skip
    model = Pooled(conv.GCNConv(6, 8), conv.GCNConv(8, 8), made, nn.Linear(width, 3))
    # these read the last position, so that a graph's output depends on the largest graph's size
    sizes = (4,) * N if name in ("LSTMAggregation", "GRUAggregation") else SIZES
    return subject(model, "x", "edge_index", "batch", sizes=sizes)


class Selecting(nn.Module):
    """A pooling that keeps some nodes of every graph."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        from torch_geometric.nn import conv

        self.first, self.second = conv.GCNConv(6, 8), conv.GCNConv(8, 8)
        self.pool, self.head = pool, nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import pool

        x = torch.relu(self.first(x, edge_index))
        found = self.pool(x, edge_index, batch=batch)
        x, edge_index = found[0], found[1]
        batch = found[3] if len(found) > 4 else found[2]
        return self.head(pool.global_mean_pool(self.second(x, edge_index), batch))


@pyg("top-k pooling", "TopKPooling")
@pyg("SAG pooling", "SAGPooling")
@pyg("ASA pooling", "ASAPooling")
@pyg("edge pooling", "EdgePooling")
def selecting(name: str) -> Subject:
    from torch_geometric.nn import pool

    return subject(Selecting(getattr(pool, name)(8)), "x", "edge_index", "batch")


def neighbours(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of one molecule, and their distances."""
    same = batch.unsqueeze(0) == batch.unsqueeze(1)
    same.fill_diagonal_(False)
    edges = same.nonzero().t()
    return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1)


@pyg("SchNet")
def schnet() -> Subject:
    from torch_geometric.nn import SchNet

    model = SchNet(8, 8, 2, 5, interaction_graph=neighbours)
    return subject(model, "z", "pos", "batch")


class Points(nn.Module):
    """PointNet's convolution on given edges."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv, self.head = conv, nn.Linear(8, 3)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import pool

        return self.head(pool.global_max_pool(self.conv(x, pos, edge_index), batch))


@pyg("PointNetConv", "PointNetConv")
@pyg("PointTransformerConv", "PointTransformerConv")
def points(name: str) -> Subject:
    from torch_geometric.nn import conv

    kind = getattr(conv, name)
    if name == "PointNetConv":
        made = kind(nn.Linear(9, 8), nn.Linear(8, 8))
    else:
        made = kind(6, 8)
    return subject(Points(made), "x", "pos", "edge_index", "batch")


class Relations(nn.Module):
    """Two kinds of nodes; ``empty``: a relation without edges."""

    def __init__(self, conv: nn.Module, width: int, *, empty: bool) -> None:
        super().__init__()
        self.conv, self.head, self.empty = conv, nn.Linear(2 * width, 3), empty

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import pool

        nothing = edge_index[:, :0]
        edges = {
            ("a", "to", "b"): edge_index,
            ("b", "to", "a"): nothing if self.empty else edge_index.flip(0),
            ("a", "in", "a"): nothing if self.empty else edge_index,
        }
        found = self.conv({"a": x, "b": x.flip(1)}, edges)
        return self.head(torch.cat([pool.global_mean_pool(found[k], batch) for k in "ab"], 1))


@pyg("HeteroConv of SAGEConv", "SAGEConv", False)
@pyg("HeteroConv of SAGEConv, empty relations", "SAGEConv", True)
@pyg("HeteroConv of GATv2Conv, empty relations", "GATv2Conv", True)
@pyg("HGTConv", "HGTConv", False)
@pyg("HGTConv, empty relations", "HGTConv", True)
@pyg("HANConv", "HANConv", False)
def relations(name: str, empty: bool) -> Subject:
    from torch_geometric.nn import conv

    kinds = [("a", "to", "b"), ("b", "to", "a"), ("a", "in", "a")]
    if name in ("HGTConv", "HANConv"):
        made = getattr(conv, name)({"a": 6, "b": 6}, 8, (["a", "b"], kinds), heads=2)
    else:
        more = {"add_self_loops": False} if name == "GATv2Conv" else {}
        made = conv.HeteroConv({k: getattr(conv, name)((6, 6), 8, **more) for k in kinds})
    return subject(Relations(made, 8, empty=empty), "x", "edge_index", "batch")


class Typed(nn.Module):
    """Relations told apart by a number on every edge; one of them has no edges."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv, self.head = conv, nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import pool

        kind = (edge_index[0] < edge_index[1]).long()
        return self.head(pool.global_mean_pool(self.conv(x, edge_index, kind), batch))


@pyg("RGCNConv", "RGCNConv", {})
@pyg("RGCNConv, bases", "RGCNConv", {"num_bases": 2})
@pyg("RGCNConv, blocks", "RGCNConv", {"num_blocks": 2})
@pyg("FastRGCNConv", "FastRGCNConv", {})
@pyg("RGATConv", "RGATConv", {})
@pyg("FiLMConv", "FiLMConv", {})
def typed(name: str, arguments: dict[str, Any]) -> Subject:
    from torch_geometric.nn import conv

    return subject(
        Typed(getattr(conv, name)(6, 8, num_relations=3, **arguments)), "x", "edge_index", "batch"
    )
