"""Small models of sequences, sets and graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .case import Case, classify, predict
from .language import LanguageModel
from .small import Residual, small
from .vision import VisionTransformer

NODES, FEATURES, HIDDEN = 12, 6, 16


def sequences(net: nn.Module, n: int = 16, t: int = 8, d: int = 8) -> Case:
    """Real sequences of three classes."""
    return net, torch.randn(n, t, d), torch.randint(3, (n,)), classify


def graphs(net: nn.Module, n: int = 16) -> Case:
    """Node features with the adjacency matrix beside them: (n, nodes, features + nodes)."""
    edges = (torch.rand(n, NODES, NODES) < 0.3).float()
    edges = ((edges + edges.mT) > 0).float()
    x = torch.cat([torch.randn(n, NODES, FEATURES), edges], 2)
    return net, x, torch.randint(3, (n,)), classify


class Cells(nn.Module):
    """A recurrent cell in a Python loop."""

    def __init__(self, cell: nn.Module, hidden: int = 16) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of the last state."""
        state = None
        for step in x.unbind(1):
            state = self.cell(step) if state is None else self.cell(step, state)
        out: Tensor = self.head(state[0] if isinstance(state, tuple) else state)
        return out


@small
def lstm_cell() -> Case:
    """nn.LSTMCell, eight steps."""
    return sequences(Cells(nn.LSTMCell(8, 16)))


@small
def gru_cell() -> Case:
    """nn.GRUCell, eight steps."""
    return sequences(Cells(nn.GRUCell(8, 16)))


@small
def rnn_cell() -> Case:
    """nn.RNNCell, eight steps."""
    return sequences(Cells(nn.RNNCell(8, 16)))


class Recurrent(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of the last output."""
        out: Tensor = self.head(self.layer(x)[0][:, -1])
        return out


@small
def gru_layer() -> Case:
    """nn.GRU, eight steps."""
    return sequences(Recurrent())


class Pooled(nn.Module):
    """Layers, the mean over positions, a head."""

    def __init__(self, *layers: nn.Module, width: int) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        out: Tensor = self.head(self.layers(x).mean(1))
        return out


@small
def tiny_encoder() -> Case:
    """nn.TransformerEncoderLayer twice."""
    layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)]
    return sequences(Pooled(nn.Linear(8, 16), *layers, width=16))


@small
def tabular_transformer() -> Case:
    """Blocks over the columns of a table."""
    blocks = [Block(16, 2, False) for _ in range(2)]
    return sequences(Pooled(nn.Linear(8, 16), *blocks, width=16), 32, 12)


@small
def tiny_language_model() -> Case:
    """Two causal blocks."""
    net = LanguageModel(50, 16, 2, 2, 12, tied=False)
    return net, torch.randint(50, (8, 12)), torch.randint(50, (8, 12)), predict


@small
def tiny_vit() -> Case:
    """Patches, a class token, one block."""
    net = VisionTransformer(16, 1, 2, 10)
    return net, torch.randn(8, 3, 32, 32), torch.randint(10, (8,)), classify


class Transposed(nn.Module):
    """A layer over the positions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, d) to the same."""
        out: Tensor = self.inner(x.mT).mT
        return out


@small
def mixer() -> Case:
    """Layers over channels and over positions, in turn."""
    blocks = [
        layer
        for _ in range(2)
        for layer in (
            Residual(nn.LayerNorm(16), Transposed(nn.Linear(8, 8)), nn.GELU()),
            Residual(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
        )
    ]
    return sequences(Pooled(nn.Linear(8, 16), *blocks, width=16))


class Queries(nn.Module):
    """Learned queries look at a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 4, 16))
        self.first, self.key, self.value = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        h = self.first(x)
        q = self.queries.expand(len(x), -1, -1)
        found = F.scaled_dot_product_attention(q, self.key(h), self.value(h))
        out: Tensor = self.head(found.flatten(1))
        return out


@small
def learned_queries() -> Case:
    """Cross-attention from parameters."""
    return sequences(Queries())


@small
def deep_set() -> Case:
    """A function of the mean of functions."""
    layers = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    return sequences(Pooled(*layers, width=32), t=20)


class GraphNetwork(nn.Module):
    """Layers over nodes and their neighbours, the mean over nodes, a head."""

    def __init__(self, kind: str, depth: int = 3) -> None:
        super().__init__()
        self.kind = kind
        widths = [FEATURES] + [HIDDEN] * depth
        self.own = nn.ModuleList(nn.Linear(i, HIDDEN) for i in widths[:-1])
        self.other = nn.ModuleList(nn.Linear(i, HIDDEN) for i in widths[:-1])
        self.head = nn.Linear(HIDDEN, 3)
        if kind == "attention":
            self.scores = nn.ModuleList(nn.Linear(HIDDEN, 2) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of every graph."""
        h, edges = x[..., :FEATURES], x[..., FEATURES:]
        for k, (own, other) in enumerate(zip(self.own, self.other, strict=True)):
            if self.kind == "attention":
                h = self.attend(k, other(h), edges) + own(h)
            elif self.kind == "sum":
                h = own(h) + other(edges @ h)
            else:
                h = own(h) + other(edges @ h / edges.sum(2, keepdim=True).clamp(min=1))
            h = h.relu()
        out: Tensor = self.head(h.mean(1))
        return out

    def attend(self, k: int, h: Tensor, edges: Tensor) -> Tensor:
        """Neighbours weighted by learned scores."""
        source, target = self.scores[k](h).unbind(2)
        logits = F.leaky_relu(source[:, None, :] + target[:, :, None], 0.2)
        return logits.masked_fill(edges == 0, -1e9).softmax(2) @ h


@small
def graph_convolutions() -> Case:
    """The mean of neighbours."""
    return graphs(GraphNetwork("mean"))


@small
def graph_isomorphism() -> Case:
    """The sum of neighbours."""
    return graphs(GraphNetwork("sum"))


@small
def graph_attention() -> Case:
    """Attention over neighbours."""
    return graphs(GraphNetwork("attention"))


class EdgeNetwork(nn.Module):
    """Messages along a list of edges, added up at their targets; all graphs in one."""

    def __init__(self, sources: Tensor, targets: Tensor) -> None:
        super().__init__()
        self.sources, self.targets = sources, targets
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.messages = nn.ModuleList(nn.Linear(2 * HIDDEN, HIDDEN) for _ in range(3))
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of every graph."""
        n = len(x)
        shift = torch.arange(n)[:, None] * NODES
        sources, targets = (shift + self.sources).flatten(), (shift + self.targets).flatten()
        h = self.first(x.flatten(0, 1)).relu()
        for layer in self.messages:
            sent = layer(torch.cat([h[sources], h[targets]], 1)).relu()
            h = h + torch.zeros_like(h).index_add(0, targets, sent)
        out: Tensor = self.head(h.view(n, NODES, -1).mean(1))
        return out


@small
def edge_network() -> Case:
    """Message passing over edge lists, as graph libraries batch them."""
    net = EdgeNetwork(torch.randint(NODES, (30,)), torch.randint(NODES, (30,)))
    return net, torch.randn(16, NODES, FEATURES), torch.randint(3, (16,)), classify
