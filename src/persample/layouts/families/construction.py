"""Tensors made from numbers: their elements are of the samples that the numbers are of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import Mixing
from ..call import Call, Result
from ..layout import Layout
from ..operators import CONSTANT, rule


@rule("tensor new_tensor new as_tensor asarray", linear=True)
def copied(call: Call) -> Result:
    """``torch.tensor(h)``, ``torch.tensor([h[0], 1.0])``: values are copied, without gradient."""
    data = call.arg(1 if call.name.startswith("new") else 0, "data", "obj")
    if isinstance(data, Tensor):
        return call.layout(data)
    found: list[Tensor] = []
    if isinstance(data, (list, tuple)):
        found = [_colours(call, item) for item in data]
    if not any(bool((ids >= 0).any()) for ids in found):
        return None
    return call.painted(torch.stack(found))


def _colours(call: Call, item: Any) -> Tensor:
    """The sample of every number in nested lists, in the shape of the tensor they become."""
    if isinstance(item, Tensor):
        return call.colours(item).cpu().expand(item.shape)
    if isinstance(item, (list, tuple)) and item:
        return torch.stack([_colours(call, inner) for inner in item])
    return torch.full((0,) if isinstance(item, (list, tuple)) else (), -1)


_FILLED = "full full_like new_full scalar_tensor linspace logspace arange"


@rule(_FILLED, routes=True)
def fill(call: Call) -> Result:
    """Numbers that every element is made of; integers are treated as constants, like sizes."""
    given = call.tensors()
    values = given[1:] if call.name in ("full_like", "new_full", "fill") else given
    owners: set[int] = set()
    for value in values:
        if value.is_floating_point() or value.is_complex():
            owners.update(call.colours(value).flatten().tolist())
    owners = {owner for owner in owners if owner >= 0}
    if not owners:
        return None
    if len(owners) > 1:
        raise Mixing("a value that holds samples is written to every element")
    out: Tensor = call.out
    return Layout(0, 1, torch.full((1,) * out.dim(), owners.pop(), device=out.device))


rule("fill")(fill)  # ``x.fill_(value)``: whatever x was is gone
CONSTANT.update(("tensor", "new_tensor", "new", *_FILLED.split()))
