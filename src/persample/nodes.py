"""A tensor's ``grad_fn`` as code inside a recording sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import UsageError, from_torch

if TYPE_CHECKING:
    from .custom import CustomFunctions


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
        return getattr(self._node, name)

    def __repr__(self) -> str:
        return repr(self._node)


def graph_node(custom: CustomFunctions, node: Any) -> Any:
    """The node itself for torch's own code (modules' hooks), a guarded one for everybody else's."""
    if node is None:
        return None
    if from_torch():
        custom.exposed = True
        return node
    return GraphNode(node)
