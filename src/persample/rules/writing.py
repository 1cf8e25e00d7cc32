"""Parameters written into data: mask tokens, borders, ``x[mask] = token``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..layouts import squeeze_colours
from ..layouts.layout import Layout, explicit, ids_of
from ..uses.use import Firing, Use
from .broadcast import unbroadcast
from .by_sample import Unsuited, only_output
from .table import Forms, rule


@rule("setitem index_put")
def write(use: Use, firing: Firing, n: int) -> Forms:
    """What was written gets the gradient of where it is."""
    _, index, value = use.bind(firing, "input", "indices", "values")
    grad, layout = only_output(use, firing)
    if len(use.operands) != 1 or use.operands[0].value is not value:
        raise Unsuited
    if use.operator == "index_put":
        index = tuple(slice(None) if i is None else i for i in index)
    part = grad[index]
    return [unbroadcast(part, _layout_of_part(layout, grad, index, n), use.operands[0], n)]


def _layout_of_part(layout: Layout, grad: Tensor, index: Any, n: int) -> Layout:
    """The layout of ``grad[index]``."""
    ids = ids_of(layout, grad.shape, n, grad.device).expand(grad.shape)[index]
    return explicit(squeeze_colours(ids, n), n)


@rule("masked_fill")
def masked_fill(use: Use, firing: Firing, n: int) -> Forms:
    """The value gets the gradient where the mask is true, what is filled gets the other."""
    x, mask = use.bind(firing, "input", "mask")
    grad, layout = only_output(use, firing)
    if not isinstance(mask, Tensor):
        raise Unsuited
    found: Forms = []
    for operand in use.operands:
        part = grad.masked_fill(mask if operand.value is x else ~mask, 0)
        found.append(unbroadcast(part, layout, operand, n))
    return found
