"""Products in which zeros keep samples separate: block-diagonal graphs, attention masks of a pack.

What is multiplied by a constant zero has no influence and receives no gradient. Whether a constant
is zero is read off its values. This is for calls whose shapes alone would let samples interact.
A zero times what is not finite is not zero: the caller sees to that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import Mixing
from .call import Call
from .families.contraction import einsum_terms, places_of, product_equation, spell_terms
from .layout import Coloured, Constant, Layout, disagree, ids_of, uncoupled
from .operators import Operator
from .reshaping import squeeze_colours

ZEROS = frozenset(("matmul", "mm", "bmm", "einsum", "scaled_dot_product_attention"))


def separate_by_zeros(
    operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], out: Any,
    coloured: Coloured, n: int,
) -> Layout | None:  # fmt: skip
    """The layout of a product of samples and a constant, if its zeros keep samples separate."""
    layouts = uncoupled(coloured)
    rest = [(t, state) for t, state in coloured if id(t) not in layouts]
    if any(not isinstance(state, Constant) or t.requires_grad for t, state in rest):
        return None
    call = Call(operator.name, lambda: None, args, kwargs, out, layouts, n)
    try:
        if operator.name == "scaled_dot_product_attention":
            return _attention(call)
        return _product(call)
    except (Mixing, RuntimeError, IndexError):  # a rule that cannot cope proves nothing
        return None


def _constant(call: Call, tensor: Any) -> bool:
    """Whether a tensor's values are the same for whatever the samples and parameters are."""
    strided = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return strided and call.layout(tensor) is None and not tensor.requires_grad


def _product(call: Call) -> Layout | None:
    """Two factors, one of them constant: an element is of the samples that it is made of."""
    equation, factors = _as_equation(call)
    if len(factors) != 2:
        return None
    at = 1 if _constant(call, factors[1]) else 0
    constant, data = factors[at], factors[1 - at]
    layout = call.layout(data)
    if layout is None or len(layout.axes) != 1 or not _constant(call, constant):
        return None
    letters = spell_terms(equation, factors, call.out.dim())
    kept = places_of(letters[1 - at], letters[2])[layout.axes[0]] is not None
    if kept or bool(constant.all()) or not bool(data.isfinite().all()):
        return None
    ids = ids_of(layout, data.shape, call.n, data.device)

    def run(values: Tensor) -> Tensor:
        """The same product of where the constant is not zero, and of these values."""
        given = [constant.ne(0).double(), values.expand(data.shape)]
        return torch.einsum(equation, given if at == 0 else given[::-1])

    return _read_zeros(ids, run, call.n)


def _as_equation(call: Call) -> tuple[str, Sequence[Tensor]]:
    """A product as ``einsum`` spells it, and its factors."""
    if call.name == "einsum":
        return einsum_terms(call.args)
    a, b = call.arg(0, "input", "self"), call.arg(1, "other", "mat2")
    return product_equation(a.dim(), b.dim()), [a, b]


def _read_zeros(ids: Tensor, run: Callable[[Tensor], Tensor], n: int) -> Layout | None:
    """The only sample that each element of a product is made of, if there is no other."""
    known = ids.clamp(min=0).double()
    counts, sums, squares = run((ids >= 0).double()), run(known), run(known.square())
    sample = (sums / counts.clamp(min=1)).round()
    # all numbers are the same if their sum and the sum of their squares are as if they were
    if bool((sums != counts * sample).any()) or bool((squares != counts * sample.square()).any()):
        return None
    found = torch.where(counts > 0, sample.to(torch.long), -1)
    return Layout(0, 1, squeeze_colours(found, n))


def _attention(call: Call) -> Layout | None:
    """A query belongs to the sample whose keys its mask leaves to it."""
    q, k, v = call.arg(0, "query"), call.arg(1, "key"), call.arg(2, "value")
    mask, rows = call.arg(3, "attn_mask"), call.out.dim() - 2
    if mask is None or call.arg(5, "is_causal", default=False) or not _constant(call, mask):
        return None
    queries, keys, values = (_rows(call, t) for t in (q, k, v))
    if queries is None or keys is None or values is None or not torch.equal(keys, values):
        return None
    open_ = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    keys = keys.unsqueeze(-2)
    left = torch.where(open_, keys, -1)
    owner = left.amax(-1)
    finite = all(bool(t.isfinite().all()) for t in (q, k, v)) and _mask_outweighs(q, k, mask)
    closed = _closed_rows_are_zero(call.out, mask, open_)
    mixed = disagree(left, owner.unsqueeze(-1)) or disagree(queries, owner)
    if mixed or not finite or not closed:
        return None
    colours = torch.maximum(queries, owner).unsqueeze(-1)
    return Layout(rows, 1, squeeze_colours(colours, call.n))


def _closed_rows_are_zero(out: Tensor, mask: Tensor, open_: Tensor) -> bool:
    """Whether queries that see no key made nothing of all keys: minus infinity for each does."""
    seeing = open_.any(-1, keepdim=True)
    if bool(seeing.all()):
        return True
    return mask.dtype == torch.bool and not bool(out.detach().masked_select(~seeing).any())


def _mask_outweighs(q: Tensor, k: Tensor, mask: Tensor) -> bool:
    """Whether no product of a query and a key comes near what closes a mask of numbers."""
    if mask.dtype == torch.bool:
        return True
    sizes = [torch.linalg.vector_norm(t.double(), dim=-1).max() for t in (q, k)]
    return bool(sizes[0] * sizes[1] < torch.finfo(mask.dtype).max ** 0.5)


def _rows(call: Call, tensor: Tensor) -> Tensor | None:
    """The sample of each row, negative for rows of nobody; None where rows hold several.

    Queries that are constants, or made of parameters alone, are the sample's whose keys they see.
    """
    ids = call.colours(tensor)
    return ids.squeeze(-1) if ids.shape[-1] == 1 else None
