"""Nodes of autograd's graph: walks through it, and what code inside a recording sees of it."""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any

from torch import Tensor
from torch.autograd.function import AUTOGRAD_FUNCTION_COUNTER, BackwardCFunction

from .errors import StaleError, UsageError


class GraphNode:
    """A tensor's ``grad_fn`` as code inside a recording sees it: to look at, not to hook."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise UsageError(
                "a hook on a graph node inside a recording",
                why="it could exchange gradients between samples unseen",
                fix="hook the tensor: tensor.register_hook(...)",
            )
        if name == "next_functions":
            return tuple((n and GraphNode(n), number) for n, number in self._node.next_functions)
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node is (other._node if isinstance(other, GraphNode) else other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return repr(self._node)


def built_in(node: type) -> bool:
    """Whether a custom function's node is of torch's functions, or of ours."""
    module = getattr(node, "_forward_cls", node).__module__
    return module.split(".")[0] in ("torch", "persample")


def of_user(node: Any) -> bool:
    """Whether a node is of a function of the user's own."""
    return isinstance(node, BackwardCFunction) and not built_in(type(node))


def own_functions() -> bool:
    """Whether the user's program has custom functions at all."""
    return _some_own(repr(AUTOGRAD_FUNCTION_COUNTER))


@functools.lru_cache(maxsize=1)
def _some_own(count: str) -> bool:
    """Of so many classes that were ever defined: looked at again when there are others."""
    return not all(built_in(node) for node in BackwardCFunction.__subclasses__())


def nodes_of(node: Any) -> list[Any]:
    """All nodes of a graph."""
    found, seen = [node], {node}
    for at in found:
        for into, _ in at.next_functions:
            if into is not None and into not in seen:
                seen.add(into)
                found.append(into)
    return found


def leaves_of(node: Any) -> list[Tensor]:
    """The leaves of a graph."""
    return [at.variable for at in nodes_of(node) if hasattr(at, "variable")]


def ends_in(node: Any, tensors: Container[int]) -> bool:
    """Whether a graph ends in some of these tensors, given by their ids, and nowhere else."""
    ends = leaves_of(node)
    return bool(ends) and all(id(leaf) in tensors for leaf in ends)


def lookups_of(node: Any) -> dict[int, Any]:
    """The only node that reads a leaf, by the leaf's id, where it picks rows by constants."""
    readers: dict[int, list[Any]] = {}
    for at in nodes_of(node):
        for into, _ in at.next_functions:
            if into is not None and hasattr(into, "variable"):
                readers.setdefault(id(into.variable), []).append(at)
    return {
        leaf: found[0]
        for leaf, found in readers.items()
        if len(found) == 1
        and found[0].name() == "EmbeddingBackward0"
        and not found[0]._saved_scale_grad_by_freq
    }


def expect_unconverted(node: Any, where: str = "") -> None:
    """Refuse to go back to parameters that are of another dtype now: the graph is of the old one.

    Torch gives such a tensor another end of the graph, and finds no path to it any more.
    """
    for at in nodes_of(node):
        if hasattr(at, "variable") and at._input_metadata[0].dtype != at.variable.dtype:
            raise StaleError(
                "a parameter was converted to another dtype after it was recorded",
                where=where,
                why=f"its graph is of {at._input_metadata[0].dtype}, it is {at.variable.dtype} now",
                fix="convert the model before the block, or after the tape was queried",
            )


def is_edge(tensor: Tensor, node: Any, number: int) -> bool:
    """Whether a graph edge leads to this tensor."""
    if tensor.grad_fn is None:
        return getattr(node, "variable", None) is tensor
    return tensor.grad_fn is node and tensor.output_nr == number
