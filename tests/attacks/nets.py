"""Attacks by graphs: several nodes per sample, messages along edges, nodes without messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .base import EITHER, EXACT, REFUSED, N, Net, Script, lin, rand, spread
from .rows import Pair, both

OWNERS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])  # eight nodes of three graphs
NODES = rand(8, N)
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [1, 0, 1, 4, 3, 6, 5]])  # 2 and 7 receive nothing
CROSSED = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [1, 0, 1, 4, 3, 6, 4]])  # from graph 2 to graph 1


def messages(h: Tensor, edges: Tensor) -> Tensor:
    """The sum of what every node receives."""
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


def pooled(h: Tensor, owners: Tensor) -> Tensor:
    """The sum over each graph's nodes."""
    return h.new_zeros(3, h.shape[1]).index_add(0, owners, h)


def counts(owners: Tensor) -> Tensor:
    """How many nodes each graph has."""
    return torch.bincount(owners, minlength=3).unsqueeze(1)


def separate(m: nn.Module, x: Tensor, edges: Tensor, owners: Tensor) -> Tensor:
    """A layer meets the messages before they meet the node: some nodes have none."""
    h = m.l(x)
    return pooled(h + m.k(messages(h, edges)).tanh(), owners)


def mean_pooled(m: nn.Module, x: Tensor, edges: Tensor, owners: Tensor) -> Tensor:
    """A mean over nodes."""
    return m.k(pooled(m.l(x).tanh(), owners) / counts(owners))


def crossed_counts(m: nn.Module, x: Tensor, edges: Tensor, owners: Tensor) -> Tensor:
    """Divided by the number of nodes of another graph."""
    return m.k(pooled(m.l(x).tanh(), owners) / counts(owners).flip(0))


def shared_counts(m: nn.Module, x: Tensor, edges: Tensor, owners: Tensor) -> Tensor:
    """Bins that count nodes of several graphs."""
    return pooled(m.l(x), owners) * torch.bincount(owners % 2, minlength=3).unsqueeze(1)


def adjacency(edges: Tensor) -> Tensor:
    """The edges as a sparse matrix."""
    weights = torch.ones(edges.shape[1], dtype=torch.float64)
    return torch.sparse_coo_tensor(edges.flip(0), weights, (8, 8))


def sparse(m: nn.Module, x: Tensor, edges: Tensor, owners: Tensor) -> Tensor:
    """Messages by a sparse product."""
    return pooled(m.k(m.l(x) + torch.sparse.mm(adjacency(edges), m.l(x))), owners)


def sparse_method(m: nn.Module, x: Tensor, edges: Tensor, owners: Tensor) -> Tensor:
    """The same by an operator, dense and sparse of equal shapes."""
    first = (torch.eye(8, dtype=torch.float64).to_sparse() @ m.l(x)).tanh()
    return pooled(m.k(adjacency(edges) @ first), owners)


def dense(m: nn.Module, x: Tensor, edges: Tensor, owners: Tensor) -> Tensor:
    """The same by a dense product after a sparse one."""
    return pooled(m.k(adjacency(EDGES).to_dense() @ (adjacency(EDGES) @ m.l(x))), owners)


def attention(m: nn.Module, x: Tensor, edges: Tensor, owners: Tensor) -> Tensor:
    """Messages weighted by a softmax over those that arrive; pooled without a layer in between."""
    h = m.l(x)
    score = (h[edges[0]] * m.k(h)[edges[1]]).sum(1).exp()
    total = torch.zeros(8, dtype=torch.float64).index_add(0, edges[1], score)
    weights = (score / total[edges[1]]).unsqueeze(1)
    return pooled(torch.zeros_like(h).index_add(0, edges[1], weights * h[edges[0]]), owners)


def scattered(m: nn.Module, x: Tensor, edges: Tensor, owners: Tensor) -> Tensor:
    """Rows of nobody are written where rows of samples are."""
    h = messages(m.l(x), edges)
    return h.new_zeros(3, N).scatter_add(0, owners.unsqueeze(1).expand(8, N), h) * m.k.bias


def put(m: nn.Module, x: Tensor, edges: Tensor, owners: Tensor) -> Tensor:
    """The same by ``index_put``."""
    h = messages(m.l(x), edges)
    return h.new_zeros(3, N).index_put((owners,), h, accumulate=True) * m.k.bias


def of(body: Callable[..., Tensor], edges: Tensor = EDGES) -> Callable[[], Pair]:
    """Record a batch of three graphs."""

    def run() -> Pair:
        model = Net(body, l=lin(), k=lin(seed=2))
        # A copy: an input that is the very tensor of sample_ids= counts as a constant.
        options: dict[str, Any] = {"n": 3, "sample_ids": OWNERS.clone()}
        return both(model, lambda: spread(model(NODES, edges, OWNERS)), **options)

    return run


NETS: dict[str, tuple[str, Callable[[], Pair]]] = {
    "nodes without messages": (EXACT, of(separate)),
    "messages between graphs": (REFUSED, of(separate, CROSSED)),
    "attention": (EXACT, of(attention)),
    "attention between graphs": (REFUSED, of(attention, CROSSED)),
    "scattered": (EXACT, of(scattered)),
    "scattered, between graphs": (REFUSED, of(scattered, CROSSED)),
    "put": (EXACT, of(put)),
    "put, between graphs": (REFUSED, of(put, CROSSED)),
    "mean over nodes": (EXACT, of(mean_pooled)),
    "sparse": (EXACT, of(sparse)),
    "sparse, between graphs": (REFUSED, of(sparse, CROSSED)),
    "sparse by operator": (EXACT, of(sparse_method)),
    "sparse by operator, between graphs": (REFUSED, of(sparse_method, CROSSED)),
    "dense after sparse": (EITHER, of(dense)),
    "counts of other graphs": (REFUSED, of(crossed_counts)),
    "counts of several graphs": (REFUSED, of(shared_counts)),
}


def scripts() -> Iterator[Script]:
    """All of this file."""
    for name, (expectation, run) in NETS.items():
        yield Script(f"net: {name}", run, expectation)
