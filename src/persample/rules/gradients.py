"""Gradients of uses by their data, where the operator is a product of data and parameters.

B is linear in its data. Its gradient, given g, is B*(g), and the derivative of ⟨c, B*(g)⟩ = ⟨B(c),
g⟩ by a parameter is that of the operator itself, with data c and output gradient g. The gradient of
the gradient is B again. So the operator's own rule serves all of them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..uses.gradient_use import Gradient
from ..uses.use import Firing, Operand, Use

_WITH_BIAS = frozenset(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d".split()
)
_PRODUCTS = _WITH_BIAS | frozenset("matmul mm bmm mul multiply einsum".split())


class Product(NamedTuple):
    """A use as B or B* of one of its data; ``result``: which result it is, the others are zero."""

    operator: Use
    adjoint: bool
    data: int | None
    result: int | None


def product_of(use: Use) -> Product | None:
    """How a use is a product; None if it is not."""
    if not isinstance(use.func, Gradient):
        plain = use.operator in _PRODUCTS and len(use.kind.data) == 1
        return Product(use, False, 0, 0) if plain else None
    of, wanted, given = use.func.use, use.func.wanted, use.func.given
    known = product_of(of)
    if known is None:
        return None
    seed = len(of.kind.data) + given.index(known.result) if known.result in given else None
    result = wanted.index(known.data) if known.data in wanted else None
    return Product(known.operator, not known.adjoint, seed, result)


def as_operator(product: Product, firing: Firing) -> Firing | None:
    """What the operator itself would have been brought; None where nothing is moved."""
    if product.data is None or product.result is None:
        return None
    data: Tensor | None = firing.saved[product.data]
    grad = firing.grads[product.result]
    if product.adjoint:
        data, grad = grad, data
    return None if data is None or grad is None else Firing((data,), (grad,))


def is_added(use: Use, firing: Firing, operand: Operand) -> bool:
    """Whether an operand of a product is its bias, which no gradient by data depends on."""
    if use.operator not in _WITH_BIAS:
        return False
    return use.bind(firing, "input", "weight", "bias")[2] is operand.value
