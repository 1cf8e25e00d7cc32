"""Back through the graph of tensors that were derived from parameters alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..autograd_graph import nodes_of

Found = list[Tensor | None]


def ends(nodes: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """What to ask a graph for, where parameters or edges of it are wanted.

    A parameter that was frozen since is found where the graph ends.
    """
    frozen = {id(w) for w in wanted if isinstance(w, Tensor) and not w.requires_grad}
    if not frozen:
        return list(wanted)
    last = {
        id(at.variable): GradientEdge(at, 0)
        for node in nodes
        for at in nodes_of(node)
        if hasattr(at, "variable") and id(at.variable) in frozen
    }
    # torch asks for something that requires a gradient, also where no path leads to it
    nowhere = torch.zeros((), requires_grad=True)
    return [last.get(id(w), nowhere) if id(w) in frozen else w for w in wanted]


def walk(
    edges: Sequence[Any],
    parameters: Sequence[Any],
    seeds: Sequence[Tensor],
    *,
    batched: bool = False,
) -> Found:
    """Each parameter's gradient of all edges together; None where no path leads to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.autograd.grad(
            edges, ends([edge.node for edge in edges], parameters), seeds,
            retain_graph=True, allow_unused=True, is_grads_batched=batched,
        )  # fmt: skip
    return [None if grad is None else grad.to_dense() for grad in found]


def walk_rows(edges: Sequence[Any], parameters: Sequence[Tensor], seeds: Sequence[Tensor]) -> Found:
    """The same for rows of seeds: in one batched walk where torch can, else row by row.

    The walk may write to what it is given: a custom function's backward does.
    """
    try:
        return walk(edges, parameters, [seed.clone() for seed in seeds], batched=True)
    except RuntimeError:
        count = seeds[0].shape[0]
        each = [walk(edges, parameters, [s[i].clone() for s in seeds]) for i in range(count)]
    return [
        None if rows[0] is None else torch.stack([row for row in rows if row is not None])
        for rows in zip(*each, strict=True)
    ]
