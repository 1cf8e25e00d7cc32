"""What calls alike have in common: how leaves make up arguments, which of them are whose."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..errors import Reason
from ..layouts import Layout


@dataclass(slots=True)
class Template:
    """How a call's leaves make up its arguments; nested containers go through pytree."""

    spec: TreeSpec | None
    positional: int
    names: tuple[str, ...]
    simple: bool = field(init=False)  # the leaves are the arguments

    def __post_init__(self) -> None:
        self.simple = self.spec is None and not self.names

    def call(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keyword arguments."""
        if self.spec is not None:
            args, kwargs = tree_unflatten(leaves, self.spec)
            return args, kwargs
        k = self.positional
        if k == len(leaves):
            return tuple(leaves), {}
        return tuple(leaves[:k]), dict(zip(self.names, leaves[k:], strict=True))


def taken_apart(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Template]:
    """The leaves of a call and the template that puts them together again."""
    leaves = [*args, *kwargs.values()]
    for value in leaves:
        if isinstance(value, (list, tuple, dict)) and _holds_tensors(value):
            leaves, spec = tree_flatten((tuple(args), kwargs))
            return leaves, Template(spec, 0, ())
    return leaves, _flat_template(len(args), tuple(kwargs))


@functools.cache
def _flat_template(positional: int, names: tuple[str, ...]) -> Template:
    return Template(None, positional, names)


def _holds_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return any(
        isinstance(v, Tensor) or (isinstance(v, (list, tuple, dict)) and _holds_tensors(v))
        for v in items
    )


@dataclass(slots=True)
class Tapped:
    """The results that are tapped: which of a call's, whose, why refused, of what kind."""

    results: list[int]
    layouts: list[Layout]
    refused: list[Reason | None]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    usual: bool = field(init=False)  # none is refused, and none has samples by explicit ids

    def __post_init__(self) -> None:
        explicit = any(layout.ids is not None for layout in self.layouts)
        self.usual = not explicit and all(reason is None for reason in self.refused)


def tapped(found: Sequence[tuple[int, Layout, Reason | None, Tensor]]) -> Tapped:
    """From index, layout, why its gradient is refused, and tensor of each."""
    return Tapped(
        [index for index, _, _, _ in found],
        [layout for _, layout, _, _ in found],
        [reason for _, _, reason, _ in found],
        [out.shape for _, _, _, out in found],
        [out.dtype for _, _, _, out in found],
    )


@dataclass(slots=True)
class Kind:
    """Calls alike: operator, places of parameters (``mine``) and data among the leaves, layouts.

    ``single`` is what is tapped where the only result is; ``factors`` are places of parameters
    whose gradients take less memory as factors than written out. ``alone``: a linear layer of
    recorded parameters as they are, with a sample in every row.
    """

    operator: str
    template: Template
    mine: list[int]
    data: list[int]
    layouts: list[Layout | None]
    inplace: bool = False
    single: Tapped | None = None
    factors: set[int] = field(default_factory=set)
    alone: bool = False

    def of_rows(self, rows: Layout) -> Kind:
        """The same where explicit ids are others: those of these rows."""
        layouts = [each if each is None or each.ids is None else rows for each in self.layouts]
        single = self.single
        if single is not None:
            single = Tapped(single.results, [rows], single.refused, single.shapes, single.dtypes)
        return Kind(
            self.operator, self.template, self.mine, self.data, layouts, self.inplace, single,
            self.factors, self.alone,
        )  # fmt: skip

    def constants(self, leaves: Sequence[Any]) -> list[Any]:
        """A call's leaves without its tensors."""
        return [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
