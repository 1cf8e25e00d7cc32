"""From a use to its forms: by which rule, and whether it was used with one sample alone.

``layer(x[i])`` in a loop is a use of one sample: its forms are those of a batch of one, put among
the forms of all.

The gradient of a use by its data is a use, too. Where the operator is a product of data and
parameters, B, it is linear in its data. Its gradient, given g, is B*(g), and the derivative of
⟨c, B*(g)⟩ = ⟨B(c), g⟩ by a parameter is that of the operator itself, with data c and output
gradient g. The gradient of the gradient is B again. So the operator's own rule serves all of them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..forms import Form, Rows, SingleSamples
from ..layouts import Layout
from ..rules import RULES, Forms, OfTable, Rule, Unsuited, by_expanded_copies, generic
from ..uses import Firing, Gradient, Operand, Use
from .contribution import expect_fitting, small

_WITH_BIAS = frozenset(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d".split()
)
_PRODUCTS = _WITH_BIAS | frozenset("matmul mm bmm mul multiply einsum".split())


def forms_of(
    use: Use, firing: Firing, n: int, rules: Mapping[str, Rule], *, positions: bool
) -> tuple[Forms, str]:
    """One form per operand, and the name of the rule that gave them.

    ``rules`` are the user's own; where positions are asked for, samples stay together.
    """
    if isinstance(use.func, Gradient):
        return _of_gradient(use, firing, n)
    operator = use.kind.operator
    own = rules.get(operator)
    rule = use.rule or own or RULES.get(operator)
    if not use.tapped.usual and n > 1 and not (use.rule or own or positions):
        sample = _the_only(use)
        if sample is not None:
            forms, name = forms_of(_of_one(use), firing, 1, rules, positions=False)
            return [_placed(form, sample, n) for form in forms], name
    if rule is not None and n:
        try:
            found = rule(use, firing, n)
        except Unsuited:
            pass
        else:
            if rule is own:
                expect_fitting(use, found, n)
            return found, rule.__name__
    try:
        return by_expanded_copies(use, firing, n), by_expanded_copies.__name__
    except Unsuited:
        return generic(use, firing, n), "generic"


def _of_gradient(use: Use, firing: Firing, n: int) -> tuple[Forms, str]:
    """The forms of a gradient by data, by the operator's own rule where it is a product."""
    product = product_of(use)
    if product is None:
        return generic(use, firing, n), "generic"
    again, operator = as_operator(product, firing), product.operator
    if again is None:
        return [None] * len(use.operands), "generic"
    forms, name = forms_of(operator, again, n, {}, positions=False)
    pairs = zip(operator.operands, forms, strict=True)
    return [None if is_added(operator, again, o) else form for o, form in pairs], name


def _the_only(use: Use) -> int | None:
    """The sample that all data and results of a use belong to as a whole."""
    every = [each.ids for each in (*use.out_layouts, *use.kind.layouts) if each is not None]
    found = {-1 if ids is None or ids.numel() != 1 else int(ids) for ids in every}
    return found.pop() if len(found) == 1 and min(found) >= 0 else None


def _of_one(use: Use) -> Use:
    """The same use, as if its sample were the only one."""
    same = copy.copy(use)
    data = [None if each is None else _first(each) for each in use.kind.layouts]
    same.kind = dataclasses.replace(use.kind, layouts=data)
    outs = [_first(each) for each in use.out_layouts]
    same.tapped = dataclasses.replace(use.tapped, layouts=outs)
    return same


def _first(layout: Layout) -> Layout:
    assert layout.ids is not None
    return Layout(0, 1, torch.zeros_like(layout.ids))


def _placed(form: Form | OfTable | None, sample: int, n: int) -> Form | OfTable | None:
    """The form of one sample among n."""
    if form is None:
        return None
    if isinstance(form, OfTable):
        return OfTable(_rows(form.rows, sample, n))
    if isinstance(form, Rows):
        return _rows(form, sample, n)
    kept = small(form)
    return SingleSamples({sample: kept}, n, kept)


def _rows(form: Rows, sample: int, n: int) -> Rows:
    return Rows(torch.full_like(form.index, sample), form.index, form.values, n, form.shape)


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
    biased = use.operator in _WITH_BIAS
    return biased and use.bind(firing, "input", "weight", "bias")[2] is operand.value
