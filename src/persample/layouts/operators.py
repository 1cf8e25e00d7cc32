"""The table: operator name -> how a layout moves; and which torch function has which name."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Rule, elementwise, first_only
from .operator_facts import (
    ADDITIVE,
    ALIASING,
    BY_SHAPE,
    BY_SHAPE_ALONE,
    FRESH,
    RANDOM,
    RECURRENT,
    SHAPE_ONLY,
)


@dataclass(frozen=True, slots=True)
class Operator:
    """What the recorder needs to know of a torch function."""

    name: str
    rule: Rule | None = None
    inplace: bool = False
    linear: bool = False
    routes: bool = False
    ignore: bool = False
    takes: bool = False
    enter: bool = False
    constant: bool = False
    aliasing: bool = False
    shape_only: bool = False
    fresh: bool = False
    random: bool = False
    by_shape: bool = False
    by_shape_alone: bool = False
    graph: bool = False
    recurrent: bool = False
    additive: bool = False
    direct: int = 0

    def straight(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether this Python function only calls the operator of its name."""
        return self.direct > 0 and not (
            kwargs.get("inplace") or (len(args) > self.direct and args[self.direct])
        )


SET_DATA = "data ="  # an assignment to the attribute
NEEDS_GRAD = "requires_grad"
COND = "torch.cond"
_SETTERS = {"data": SET_DATA, NEEDS_GRAD: NEEDS_GRAD}
RULES: dict[str, Rule] = {}
LINEAR: set[str] = set()
ROUTES: set[str] = set()
CONSTANT: set[str] = set()


def rule(names: str, *, linear: bool = False, routes: bool = False) -> Callable[[Rule], Rule]:
    """Register a layout rule.

    ``linear``: a sum over samples stays one. ``routes``: integer arguments only choose rows, so
    their own origin does not matter. A name may be registered once.
    """

    def register(function: Rule) -> Rule:
        for name in names.split():
            if name in RULES:
                raise ValueError(f"two layout rules for {name}")
            RULES[name] = function
        LINEAR.update(names.split() if linear else ())
        ROUTES.update(names.split() if routes else ())
        return function

    return register


# Attributes and methods that hand out no tensor data, or none that carries a gradient.
_ATTRIBUTES = frozenset(
    """shape device dtype requires_grad is_leaf layout ndim names name _backward_hooks
    _post_accumulate_grad_hooks _base _cdata _grad _grad_fn _version grad grad_dtype itemsize nbytes
    output_nr retains_grad volatile""".split()
)
_METHODS = frozenset(
    """size dim stride numel nelement ndimension is_floating_point is_complex is_contiguous
    is_signed is_conj is_neg is_inference is_shared is_pinned is_set_to is_same_size is_nonzero
    is_distributed is_coalesced element_size storage_offset storage untyped_storage storage_type
    data_ptr const_data_ptr get_device dim_order __len__ __bool__ __int__ __float__ __index__
    __complex__ __long__ __nonzero__ __contains__ __format__ __repr__ __hash__ __reduce_ex__
    __setstate__ __deepcopy__ __dlpack__ __dlpack_device__ __array__ numpy tolist item allclose
    equal register_post_accumulate_grad_hook retain_grad _is_view sparse_dim dense_dim
    qscheme record_stream broadcast_shapes result_type can_cast promote_types
    is_tensor is_storage typename get_default_dtype""".split()
)

# Those of them that hand out numbers, and operators whose result's size is one.
_TAKES = frozenset(
    """is_nonzero data_ptr const_data_ptr storage untyped_storage __bool__ __int__ __float__
    __index__ __complex__ __long__ __nonzero__ __contains__ __format__ __repr__ __reduce_ex__
    __deepcopy__ __dlpack__ __array__ numpy tolist item allclose equal nonzero argwhere unique
    unique_consecutive unique_dim _unique2 masked_select count_nonzero _make_dual""".split()
)

_DUNDER = {
    "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "idiv": "div_",
    "ifloordiv": "floor_divide_", "imod": "remainder_", "ipow": "pow_", "iand": "bitwise_and_",
    "ior": "bitwise_or_", "ixor": "bitwise_xor_", "ilshift": "bitwise_left_shift_",
    "irshift": "bitwise_right_shift_", "truediv": "div", "div": "div", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift", "invert": "bitwise_not", "mod": "remainder",
    "floordiv": "floor_divide", "rtruediv": "rdiv", "getitem": "getitem", "setitem": "setitem_",
    "rand": "bitwise_and", "ror": "bitwise_or", "rxor": "bitwise_xor",
    "radd": "add", "rmul": "mul",
}  # fmt: skip


def canonical(name: str) -> tuple[str, bool]:
    """``('add', True)`` for ``add_`` and ``__iadd__``."""
    if name.startswith("__") and name.endswith("__"):
        name = _DUNDER.get(name[2:-2], name[2:-2])
    inplace = name.endswith("_")
    return name.rstrip("_"), inplace


@functools.cache
def operators() -> dict[Any, Operator]:
    """Every function, method and attribute of torch that can be called, by object."""
    table: dict[Any, Operator] = {}
    for namespace in _namespaces():
        for attribute in dir(namespace):
            own = getattr(namespace, "__dict__", {})
            value = own[attribute] if attribute in own else getattr(namespace, attribute, None)
            if isinstance(value, types.GetSetDescriptorType | property):
                _add_attribute(table, attribute, value)
            elif callable(value) and not isinstance(value, type):
                _add(table, value, attribute)
    return table


def _namespaces() -> list[Any]:
    """Where functions of torch are found."""
    return [
        Tensor, Tensor.__mro__[1], torch, torch._C._VariableFunctions, torch._C._nn,
        torch._C._sparse, F, torch.functional,  # type: ignore[attr-defined]
        torch._C._linalg, torch.linalg, torch._C._fft, torch.fft,  # type: ignore[attr-defined]
        torch._C._special, torch.special,  # type: ignore[attr-defined]
    ]  # fmt: skip


def _add_attribute(table: dict[Any, Operator], name: str, value: Any) -> None:
    if name in _ATTRIBUTES or name.startswith("is_"):
        table[value.__get__] = Operator(name, ignore=True)
    else:
        table[value.__get__] = describe_operator(value.__get__, name)
    if name in _SETTERS:
        table[value.__set__] = Operator(_SETTERS[name], graph=True)


def _add(table: dict[Any, Operator], function: Any, attribute: str) -> None:
    own = getattr(function, "__name__", attribute)  # C functions know their full name: linalg_norm
    made = describe_operator(function, own if own != "<lambda>" else attribute)
    try:
        known = table.get(function)
    except TypeError:
        return
    # torch.mm and torch.dsmm compare equal; the name with a rule is the operator's
    if known is None or (known.rule is None and not known.ignore):
        table[function] = made


def describe_operator(function: Any, name: str) -> Operator:
    """The operator record of a function of torch with that name."""
    if name in _METHODS:
        return Operator(name, ignore=True, takes=name in _TAKES)
    short, inplace = canonical(name)
    found = RULES.get(short)
    enter = isinstance(function, types.FunctionType) and not _whole(function, short)
    return Operator(
        short,
        rule=found,
        inplace=inplace,
        linear=short in LINEAR,
        routes=short in ROUTES,
        enter=enter,
        constant=short in CONSTANT,
        aliasing=short in ALIASING,
        shape_only=short in SHAPE_ONLY,
        fresh=short in FRESH,
        random=short in RANDOM,
        recurrent=short in RECURRENT,
        additive=short in ADDITIVE,
        direct=_DIRECT.get(function, 0) if enter else 0,
        graph=short in ("backward", "grad", "grad_fn", "register_hook", NEEDS_GRAD),
        takes=short in _TAKES,
        by_shape=not inplace and (short in BY_SHAPE or found in (elementwise, first_only)),
        by_shape_alone=short in BY_SHAPE_ALONE,
    )


# Python functions that only call the operator of their name, unless the argument at this place, or
# of the name ``inplace``, is true.
_DIRECT: dict[Any, int] = {F.layer_norm: 9, F.relu: 1, F.silu: 1, F.dropout: 3}
_WHOLE = {"rsub", "rdiv", "rpow", "rfloordiv", "rlshift", "rrshift", "rmod", "rmatmul"}


def _whole(function: Any, name: str) -> bool:
    """Python functions that are not entered: arithmetic, and methods that shadow a C method.

    The C method reports itself under the name of the Python one, so entering would not end.
    """
    shadows = Tensor.__dict__.get(name) is function and hasattr(Tensor.__mro__[1], name)
    return name in _WHOLE or shadows


def find(function: Any) -> Operator:
    """The operator record of anything the mode hands us."""
    table = operators()
    try:
        known = table.get(function)
        if known is None:
            known = table[function] = _late(function)
    except TypeError:  # not hashable
        return _late(function)
    return known


def _late(function: Any) -> Operator:
    packet = getattr(function, "overloadpacket", function)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        namespace, _, name = packet._qualified_op_name.partition("::")
        if namespace == "aten":
            return describe_operator(function, name)
        return Operator(f"{namespace}::{name}")
    if function is torch.ops.higher_order.cond:
        return Operator(COND, graph=True)
    name = getattr(function, "__name__", repr(function))
    module = getattr(function, "__module__", None) or ""
    if isinstance(function, types.FunctionType) and module.split(".")[0] == "torch":
        return describe_operator(function, name)
    return Operator(name, ignore=name == "__set__")
