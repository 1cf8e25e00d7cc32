"""What rules are written with: the table they are entered in, and tensors as (n, t, …)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..forms import Form, Rows
from ..layouts import Layout, ids_of, place_in_groups
from ..uses import Firing, Operand, Use


@dataclass(frozen=True, slots=True)
class OfTable:
    """An answer for the table behind an operand that was looked up, not for the operand."""

    rows: Rows


Forms = list[Form | OfTable | None]
Rule = Callable[[Use, Firing, int], Forms]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operator names (canonical: ``@`` and ``Tensor.matmul`` are "matmul")."""

    def register(function: Rule) -> Rule:
        for name in names.split():
            if name in RULES:
                raise ValueError(f"two rules for {name}")
            RULES[name] = function
        return function

    return register


class Unsuited(Exception):
    """A rule does not apply to this call; the generic rule does."""


def only_output(use: Use, firing: Firing) -> tuple[Tensor, Layout]:
    """The gradient of the first result, and its layout."""
    grad = firing.grads[0]
    if grad is None:
        raise Unsuited
    return grad, use.tapped.layouts[0]


def only_operand(use: Use, value: object = None) -> Operand:
    """The parameter operand, if there is one alone (and, with a ``value``, it is this one)."""
    if len(use.operands) != 1 or (value is not None and use.operands[0].value is not value):
        raise Unsuited
    return use.operands[0]


def by_sample(x: Tensor, layout: Layout, n: int, keep: int) -> Tensor:
    """(n, t, *last ``keep`` axes); rows of no sample must be zero and are dropped."""
    lead = x.dim() - keep
    if layout.ids is None and layout.axis == 0 < lead:
        if n and x.shape[0] == n * layout.inner and x.numel():  # one sample after the other
            if lead < 3 and x.shape[0] == n:
                return x if lead == 2 else x.unsqueeze(1)
            return x.reshape(n, -1, *x.shape[lead:])
    if max(layout.axes, default=0) >= lead:
        raise Unsuited
    if layout.ids is not None:
        if n == 1 and layout.ids.numel() == 1:
            return x.reshape(1, math.prod(x.shape[:lead]), *x.shape[lead:])
        return _rows_by_id(x, layout, n, lead)
    axis, inner = layout.axis, layout.inner
    size = x.shape[axis]
    if n == 0 or x.numel() == 0:
        return x.new_zeros((n, math.prod(x.shape[:lead]) // max(n, 1), *x.shape[lead:]))
    outer = size // (n * inner)
    split = x.reshape(*x.shape[:axis], outer, n, inner, *x.shape[axis + 1 :])
    return split.movedim(axis + 1, 0).reshape(n, -1, *x.shape[lead:])


def factor(x: Tensor, layout: Layout, n: int) -> Tensor:
    """(n, t, last axis), or (n, last axis) if t is 1: what an outer product is made of."""
    if x.dim() == 2 and n and layout.ids is None and layout.axis == 0 and x.shape[0] == n:
        return x
    return by_sample(x, layout, n, 1)


def _rows_by_id(x: Tensor, layout: Layout, n: int, lead: int) -> Tensor:
    rows, sizes = x.reshape(math.prod(x.shape[:lead]), *x.shape[lead:]), x.shape[:lead]
    places = layout.once((n, sizes), lambda: _Places(row_ids(x, layout, n, lead), n))
    return places.put(rows)


def row_ids(x: Tensor, layout: Layout, n: int, lead: int) -> Tensor:
    """The sample of every row when the first ``lead`` axes are flattened: (r,)."""
    ids = ids_of(layout, x.shape, n, x.device)
    if any(s != 1 for s in ids.shape[lead:]):
        raise Unsuited
    return ids.reshape(ids.shape[:lead]).expand(x.shape[:lead]).reshape(-1)


class _Places:
    """Where rows go that are sorted by sample and filled up with zeros: (n, longest, …)."""

    def __init__(self, ids: Tensor, n: int) -> None:
        self._n, self._kept, self._longest = n, None, 1
        self._sorted = ids.numel() == n and torch.equal(ids, torch.arange(n, device=ids.device))
        if self._sorted:
            return
        if bool((ids < 0).any()):
            self._kept = (ids >= 0).nonzero().flatten()
            ids = ids[self._kept]
        place, sizes = place_in_groups(ids, n)
        self._longest = max(int(sizes.max()) if n else 0, 1)
        self._at = ids * self._longest + place

    def put(self, rows: Tensor) -> Tensor:
        """Rows of no sample are left out."""
        if self._sorted:
            return rows.unsqueeze(1)
        if self._kept is not None:
            rows = rows.index_select(0, self._kept)
        out = rows.new_zeros((self._n * self._longest, *rows.shape[1:]))
        return out.index_copy_(0, self._at, rows).view(self._n, self._longest, *rows.shape[1:])
