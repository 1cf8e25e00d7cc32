"""Products: matmul and its relatives, einsum, linear, attention, and of pairs of vectors.

They are spelled as ``einsum`` spells them: a letter for each axis.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from ...errors import Mixing
from ..call import Call, Result, axes, carry, gather_colours
from ..layout import Additive, Layout, explicit, ids_of
from ..operators import rule
from ..reshaping import colour_groups

Term = tuple[Any, str]  # a tensor, and a letter for each of its axes
_PRODUCTS = {"ger": "a,b->ab", "outer": "a,b->ab", "addr": "a,b->ab", "addbmm": "kac,kcb->ab"}
# the axis that two tensors are worked along, by default, and where it is among the arguments
_ALONG: dict[str, tuple[int | None, int]] = {
    "linalg_vecdot": (-1, 2), "cosine_similarity": (1, 2), "cross": (None, 2),
    "linalg_cross": (-1, 2), "pairwise_distance": (-1, 5),
}  # fmt: skip


def product_equation(a: int, b: int) -> str:
    """``a @ b`` of tensors of these ranks."""
    left, right = "...yz" if a > 1 else "z", "...zx" if b > 1 else "z"
    return f"{left},{right}->...{left[3:4]}{right[4:]}"


@functools.lru_cache(maxsize=1024)
def places_of(letters: str, result: str) -> tuple[int | None, ...]:
    """Where each axis is in the result; of a repeated letter (a diagonal), no axis is followed."""
    return tuple(
        result.index(c) if c in result and letters.count(c) == 1 else None for c in letters
    )


def einsum_terms(args: Sequence[Any]) -> tuple[str, Sequence[Tensor]]:
    """The equation and the factors: one by one, or a sequence; without factors in sublist form."""
    equation, terms = args[0], args[1:]
    if not isinstance(equation, str):
        return "", ()
    return equation, terms[0] if isinstance(terms[0], (list, tuple)) else terms


def spell_terms(equation: str, terms: Sequence[Tensor], rank: int) -> tuple[str, ...]:
    """Every term's letters and those of the result, of this rank, without dots."""
    return _spell(equation, tuple([tensor.dim() for tensor in terms]), rank)


@functools.lru_cache(maxsize=1024)
def _spell(equation: str, ranks: tuple[int, ...], rank: int) -> tuple[str, ...]:
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        once = sorted(c for c in set(letters) if letters.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    spare = "".join(c for c in ascii_letters if c not in equation)
    spelled = []
    for each, size in zip([*left.split(",")[: len(ranks)], right], [*ranks, rank], strict=True):
        width = size - len(each.replace("...", ""))
        spelled.append(each.replace("...", spare[len(spare) - width :] if width else ""))
    return tuple(spelled)


def gather_letters(call: Call, terms: Sequence[Term], result: str) -> Layout | None:
    """The same where each operand's axes have letters: those of the result stay."""
    operands = [(tensor, places_of(letters, result)) for tensor, letters in terms]
    return gather_colours(call, operands, call.out)


def contract(call: Call, terms: Sequence[Term], result: str) -> Result:
    """The same for a sum of products, which may also be a sum over samples."""
    if _sums_samples(call, terms, result):
        return Additive()
    return gather_letters(call, terms, result)


def _sums_samples(call: Call, terms: Sequence[Term], result: str) -> bool:
    """Whether all coloured operands hold their samples, alike, on one contracted axis."""
    held = [(layout, t, c) for t, c in terms if (layout := call.layout(t)) is not None]
    if any(
        len(layout.axes) != 1 or places_of(letters, result)[layout.axes[0]] is not None
        for layout, _, letters in held
    ):
        return False
    rows = [ids_of(layout, t.shape, call.n, t.device).flatten() for layout, t, _ in held]
    alike = bool((rows[0] >= 0).all()) and all(torch.equal(rows[0], each) for each in rows)
    if alike and len({letters[layout.axes[0]] for layout, _, letters in held}) != 1:
        raise Mixing("sums over samples are multiplied with each other")
    return alike


def spell(equation: str, tensors: Sequence[Tensor], out: Tensor) -> tuple[list[Term], str]:
    """Tensors with the letters of their axes, and the letters of the result."""
    *letters, result = spell_terms(equation, tensors, out.dim())
    return list(zip(tensors, letters, strict=True)), result


def _letters_of_one(terms: Sequence[Term]) -> str:
    """The letters that only one axis has: those that are not summed over."""
    every = "".join(letters for _, letters in terms)
    return "".join(c for c in every if every.count(c) == 1)


@rule("matmul mm bmm mv dot vdot linalg_matmul ger outer rmatmul")
def matmul(call: Call) -> Result:
    """Rows of the left factor and columns of the right one keep their colours."""
    a, b = call.arg(0, "input", "self"), call.arg(1, "other", "mat2", "vec", "vec2", "tensor")
    if call.name == "rmatmul":
        a, b = b, a
    if a.layout is not torch.strided:
        return sparse_product(call)  # type: ignore[return-value]
    equation = _PRODUCTS.get(call.name) or product_equation(a.dim(), b.dim())
    return contract(call, *spell(equation, [a, b], call.out))


@rule("linalg_multi_dot chain_matmul")
def multi_dot(call: Call) -> Result:
    """Rows of the first factor and columns of the last one keep their colours."""
    given = call.arg(0, "tensors", "matrices")
    factors = list(given) if isinstance(given, (list, tuple)) else list(call.args)
    letters = [ascii_letters[k : k + 2] for k in range(len(factors))]
    letters[0] = letters[0][-factors[0].dim() :]
    letters[-1] = letters[-1][: factors[-1].dim()]
    terms = list(zip(factors, letters, strict=True))
    return gather_letters(call, terms, _letters_of_one(terms))


@rule("_sparse_mm")
def sparse_product(call: Call) -> Result:
    """A sparse constant from the left: a row is of the sample whose rows it adds up.

    Columns and matrices of a batch are multiplied one by one.
    """
    a, b, out = call.args[0], call.args[1], call.out
    layout = call.layout(b)
    if layout is None or call.layout(a) is not None:
        raise Mixing("a sparse product follows samples in its dense factor alone")
    if b.dim() > 1 and b.dim() - 2 not in layout.axes:
        return gather_letters(call, [(b, "bjk"[-b.dim() :])], "bik"[-out.dim() :])
    if layout.axes != (0,) or b.dim() > 2:
        raise Mixing("a sparse product follows samples in the rows of its dense factor alone")
    rows, columns = a.to_sparse_coo().coalesce().indices()
    why = "a row of the sparse factor adds up rows of several samples"
    found = colour_groups(rows, call.colours(b).flatten()[columns], len(out), why=why)
    return explicit(found.view(-1, *(1,) * (out.dim() - 1)), call.n)


@rule("addmm addmv baddbmm addr addbmm sspaddmm")
def addmm(call: Call) -> Result:
    """A product plus something broadcast to it."""
    base = call.arg(0, "input", "self")
    a = call.arg(1, "mat1", "batch1", "mat", "vec1")
    b = call.arg(2, "mat2", "batch2", "vec", "vec2")
    equation = _PRODUCTS.get(call.name) or product_equation(a.dim(), b.dim())
    terms, result = spell(equation, [a, b], call.out)
    return gather_letters(call, [*terms, (base, result[len(result) - base.dim() :])], result)


@rule("linear")
def linear(call: Call) -> Result:
    """Rows of the input keep their colours."""
    x, weight, bias = call.arg(0, "input"), call.arg(1, "weight"), call.arg(2, "bias")
    equation = "...i,oi,o->...o" if weight.dim() == 2 else "...i,i,->..."
    given = [x, weight] if bias is None else [x, weight, bias]
    return gather_letters(call, *spell(equation, given, call.out))


@rule("bilinear cdist _cdist_forward _euclidean_dist")
def of_rows(call: Call) -> Result:
    """Two inputs, row by row; or each row of one with each of the other, like ``a @ b.mT``."""
    given = [call.arg(0, "input1", "x1"), call.arg(1, "input2", "x2")]
    equation = "...i,...j->...o" if call.name == "bilinear" else "...ad,...bd->...ab"
    return gather_letters(call, *spell(equation, given, call.out))


@rule("_grouped_mm grouped_mm", routes=True)
def grouped_mm(call: Call) -> Result:
    """Rows of a 2-D left factor keep their colours, whatever group they are in."""
    a, b = call.arg(0, "self", "input", "mat_a"), call.arg(1, "mat2", "mat_b")
    if a.dim() not in (2, 3) or b.dim() != 3:
        raise Mixing("this form of grouped matrix product sums over rows")
    given, equation = ([a], "ri->ro") if a.dim() == 2 else ([a, b], "bri,bio->bro")
    return gather_letters(call, *spell(equation, given, call.out))


@rule("einsum")
def einsum(call: Call) -> Result:
    """The axis letter that holds the samples must reach the output."""
    equation, terms = einsum_terms(call.args)
    if not terms:
        raise Mixing("einsum in sublist form")
    return contract(call, *spell(equation, terms, call.out))


@rule("tensordot inner")
def tensordot(call: Call) -> Result:
    """Free axes of the first factor, then those of the second; ``inner`` sums over the last."""
    a, b = call.arg(0, "a", "self", "input"), call.arg(1, "b", "other")
    left = list(ascii_letters[: a.dim()])
    right = list(ascii_letters[a.dim() : a.dim() + b.dim()])
    if call.name == "tensordot":
        for i, j in zip(call.arg(2, "dims_self"), call.arg(3, "dims_other"), strict=True):
            right[j] = left[i]
    elif left and right:
        right[-1] = left[-1]
    terms = [(a, "".join(left)), (b, "".join(right))]
    return contract(call, terms, _letters_of_one(terms))


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Result:
    """Leading axes are batch axes; queries keep their place, keys and values are summed over."""
    q, k, v = call.arg(0, "query"), call.arg(1, "key"), call.arg(2, "value")
    mask, rows = call.arg(3, "attn_mask"), "q"
    if call.arg(5, "is_causal", default=False):
        rows = "k"  # a query depends on where it is
    equation = f"...{rows}d,...kd,...kv,...qk->...qv"
    given = [q, k, v] if mask is None else [q, k, v, mask]
    return gather_letters(call, *spell(equation, given, call.out))


@rule(" ".join(_ALONG))
def of_pairs(call: Call) -> Result:
    """Along one axis of two tensors that broadcast, which is kept or gone."""
    default, place = _ALONG[call.name]
    dim = call.arg(place, "dim", default=default)
    if dim is None:
        raise Mixing("torch.cross without dim picks the first axis of size 3")
    given = call.arg(0, "x", "x1", "input"), call.arg(1, "y", "x2", "other")
    rank = max(t.dim() for t in given)
    axis = next(iter(axes(dim, rank)))
    pairs = [(t, {axis - rank + t.dim()} & set(range(t.dim()))) for t in given]
    return carry(call, pairs, call.out, {axis} if call.out.dim() == rank else ())
