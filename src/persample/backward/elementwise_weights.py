"""Derived weights that are a parameter times constants, recognised in autograd's graph.

``weight * mask``, ``weight / c``, ``-weight``, ``weight + shift`` and views of such, one after the
other. Constants are copied: whoever writes to them later changes no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..forms import Form, Part, scale_form, wide
from ..uses import version

_SAME = frozenset(("AliasBackward0", "CloneBackward0", "ToCopyBackward0"))
# whether the argument that alpha belongs to is subtracted, and which it is
_ADDED = {
    "AddBackward0": (False, 1),
    "SubBackward0": (True, 1),
    "RsubBackward0": (True, 0),
    "RsubBackward1": (True, 0),
}
_RESHAPED = frozenset(
    """ViewBackward0 UnsafeViewBackward0 ReshapeAliasBackward0 UnsqueezeBackward0 SqueezeBackward0
    SqueezeBackward1 SqueezeBackward2""".split()
)
_PERMUTED: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "TBackward0": lambda node: lambda x: x.t(),
    "TransposeBackward0": lambda node: lambda x: x.transpose(*_axes(node, x.dim())),
    "PermuteBackward0": lambda node: lambda x: x.permute(_whole(node._saved_dims, x.dim())),
}


class Constants(NamedTuple):
    """What a parameter was multiplied by, and its view that was."""

    factor: Tensor | None
    key: Hashable
    places: Tensor  # a view, without memory, of a contiguous tensor of the parameter's shape


def scaled_back(form: Form, edge: Any, parameter: Tensor) -> Form | None:
    """The parameter's form, where a derived tensor is it times constants; None elsewhere."""
    dtype = wide(parameter.dtype)
    if edge.output_nr or dtype.is_complex or wide(form.dtype) != dtype:
        return None
    steps = _steps(edge.node, parameter)
    if steps is None:
        return None
    try:
        found = _constants(steps, parameter, dtype)
    except RuntimeError:  # overwritten, as autograd says itself, or a view that copies
        return None
    if found is None or found.places.shape != form.shape:
        return None
    factor, places = found.factor, found.places
    if factor is None and form.dtype != parameter.dtype:
        factor = torch.ones((), dtype=dtype, device=parameter.device)
    if factor is not None:
        form = scale_form(form, factor, found.key, parameter.dtype)
    if places.is_contiguous() and places.shape == parameter.shape:
        return form
    return Part(form, parameter.shape, places.stride(), 0)


def _steps(node: Any, parameter: Tensor) -> list[tuple[Any, int]] | None:
    """Nodes from the parameter on, each with the argument that comes from it, the only one."""
    found = []
    while not hasattr(node, "variable"):
        inputs = [k for k, (into, _) in enumerate(node.next_functions) if into is not None]
        if len(inputs) != 1 or node.next_functions[inputs[0]][1]:
            return None
        found.append((node, inputs[0]))
        node = node.next_functions[inputs[0]][0]
    return found[::-1] if node.variable is parameter else None


def _constants(
    steps: list[tuple[Any, int]], parameter: Tensor, dtype: torch.dtype
) -> Constants | None:
    places = torch.empty(parameter.shape, device="meta")
    factor: Tensor | None = None
    keys: list[Hashable] = []
    for node, argument in steps:
        name, about = node.name(), node._input_metadata[0]
        if about.device != parameter.device or wide(about.dtype) != dtype:
            return None
        if name in _PERMUTED or name in _RESHAPED:
            view = _PERMUTED[name](node) if name in _PERMUTED else _reshaped(about.shape)
            if factor is not None and factor.dim():
                factor = view(factor.expand(places.shape))
            places = view(places) if name in _PERMUTED else places.view(tuple(about.shape))
            keys.append((tuple(places.shape), places.stride()))
            continue
        known = _multiplied(node, name, argument)
        if known is None or tuple(about.shape) != tuple(places.shape):
            return None  # or the parameter was repeated
        constant, key = known
        if constant is not None:
            constant = constant.to(parameter.device, dtype)
            factor = constant if factor is None else factor * constant
            keys.append(key)
    return Constants(_own(factor, places.shape), tuple(keys), places)


def _multiplied(node: Any, name: str, argument: int) -> tuple[Tensor | None, Hashable] | None:
    """What a step multiplies by, if anything, and what tells it from others."""
    if name in _SAME:
        return None, None
    if name == "NegBackward0":
        return torch.tensor(-1.0), -1
    if name in _ADDED:
        minus, other = _ADDED[name]
        times = (-1 if minus else 1) * node._saved_alpha if argument == other else 1
        return (None, None) if times == 1 else (torch.tensor(float(times)), times)
    if name == "MulBackward0":
        constant = node._saved_self if argument else node._saved_other
    elif name == "DivBackward0" and argument == 0:
        constant = node._saved_other
    else:
        return None
    if type(constant) not in (Tensor, torch.nn.Parameter) or constant.is_complex():
        return None
    if constant.layout is not torch.strided:
        return None
    constant = constant.detach()
    key = _identity(constant)
    if name == "MulBackward0":
        return constant, key
    return constant.double().reciprocal(), ("/", key)


class _Memory:
    """Tells constants by where they are, and holds on to them: nothing else comes to lie there."""

    __slots__ = ("place", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        layout = tensor.dtype, tensor.device, tensor.shape, tensor.stride()
        self.place = (tensor.data_ptr(), version(tensor), *layout)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Memory) and self.place == other.place

    def __hash__(self) -> int:
        return hash(self.place)


def _identity(constant: Tensor) -> Hashable:
    """Equal for equal constants."""
    number = constant.dim() == 0 and constant.device.type == "cpu"
    return constant.item() if number else _Memory(constant)


def _own(factor: Tensor | None, shape: torch.Size) -> Tensor | None:
    """A copy of the constants: one number where they are all the same, else of this shape."""
    if factor is None:
        return None
    if factor.numel() == 1:
        return factor.reshape(()).clone()
    if factor.device.type == "cpu" and factor.numel():  # elsewhere a look has to be waited for
        least, most = factor.aminmax()
        if bool(least == most):
            return None if least == 1 else least.clone()
    return factor.clone().expand(shape)


def _reshaped(shape: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x.reshape(tuple(shape))


def _axes(node: Any, dim: int) -> list[int]:
    return _whole((node._saved_dim0, node._saved_dim1), dim)


def _whole(axes: Any, dim: int) -> list[int]:
    """As torch saves them, negative axes are huge numbers."""
    return [a if 0 <= a < dim else (a + dim) % 2**64 for a in axes]
