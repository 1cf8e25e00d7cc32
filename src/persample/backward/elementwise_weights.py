"""Derived weights that are a parameter times constants, recognised in autograd's graph.

``weight * mask``, ``weight / c``, ``-weight``, ``weight + shift`` and views of such, one after the
other. The constants are what comes back of ones: whoever writes to them later changes no answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..forms import Form, Part, scale_form, wide
from ..forms.pullback import walk

_SCALED = frozenset(
    """AddBackward0 SubBackward0 RsubBackward0 RsubBackward1 NegBackward0 MulBackward0
    DivBackward0""".split()
)
_SAME = frozenset(("AliasBackward0", "CloneBackward0", "ToCopyBackward0"))
_RESHAPED = frozenset(
    """ViewBackward0 UnsafeViewBackward0 ReshapeAliasBackward0 UnsqueezeBackward0 SqueezeBackward0
    SqueezeBackward1 SqueezeBackward2""".split()
)
_PERMUTED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "TBackward0": lambda node, x: x.t(),
    "TransposeBackward0": lambda node, x: x.transpose(
        *_whole((node._saved_dim0, node._saved_dim1), x.dim())
    ),
    "PermuteBackward0": lambda node, x: x.permute(_whole(node._saved_dims, x.dim())),
}


class Constants:
    """What a parameter is multiplied by; equal for equal numbers."""

    __slots__ = ("factor",)

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and torch.equal(self.factor, other.factor)

    def __hash__(self) -> int:
        return hash(self.factor.shape)


def scaled_back(form: Form, edge: Any, parameter: Tensor) -> Form | None:
    """The parameter's form, where a derived tensor is it times constants; None elsewhere."""
    dtype = wide(parameter.dtype)
    if edge.output_nr or dtype.is_complex or wide(form.dtype) != dtype:
        return None
    nodes = _chain(edge.node, parameter)
    if nodes is None:
        return None
    try:
        places = _places(nodes, parameter, dtype)
        if places is None or places.shape != form.shape:
            return None
        factor = None
        if any(node.name() in _SCALED for node in nodes):
            seed = parameter.new_ones(places.shape, dtype=edge.node._input_metadata[0].dtype)
            factor = _factor(walk([edge], [parameter], [seed])[0], places)
    except RuntimeError:  # overwritten, as autograd says itself, or a view that copies
        return None
    if factor is None and form.dtype != parameter.dtype:
        factor = torch.ones((), dtype=dtype, device=parameter.device)
    if factor is not None:
        form = scale_form(form, factor, Constants(factor), parameter.dtype)
    if places.is_contiguous() and places.shape == parameter.shape:
        return form
    return Part(form, parameter.shape, places.stride(), 0)


def _chain(node: Any, parameter: Tensor) -> list[Any] | None:
    """Nodes from the parameter on, each of which has no other argument with a history."""
    found = []
    while not hasattr(node, "variable"):
        inputs = [k for k, (into, _) in enumerate(node.next_functions) if into is not None]
        if len(inputs) != 1 or (inputs != [0] and node.name() == "DivBackward0"):
            return None
        found.append(node)
        node, result = node.next_functions[inputs[0]]
        if result:
            return None
    return found[::-1] if node.variable is parameter else None


def _places(nodes: list[Any], parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A view, without memory, of a contiguous tensor of the parameter's shape."""
    places = torch.empty(parameter.shape, device="meta")
    for node in nodes:
        name, about = node.name(), node._input_metadata[0]
        if about.device != parameter.device or wide(about.dtype) != dtype:
            return None
        if name in _PERMUTED:
            places = _PERMUTED[name](node, places)
        elif name in _RESHAPED:
            places = places.view(tuple(about.shape))
        elif tuple(about.shape) != tuple(places.shape):  # the parameter was repeated
            return None
        elif name not in _SAME and (name not in _SCALED or about.dtype != dtype):
            return None  # in half precision, constants would be rounded
    return places


def _factor(found: Tensor | None, places: Tensor) -> Tensor | None:
    """The constants: one number where they are all the same, none where that is 1."""
    if found is None or not found.numel():
        return None
    least, most = found.aminmax()
    if bool(least == most):
        return None if least == 1 else least
    return found.contiguous().as_strided(places.shape, places.stride())


def _whole(axes: Any, dim: int) -> list[int]:
    """As torch saves them, negative axes are huge numbers."""
    return [a if 0 <= a < dim else (a + dim) % 2**64 for a in axes]
