"""Products: matmul and its relatives, einsum, linear, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import Mixing
from ..call import Call, Result, axes, carry, place
from ..layout import Additive, Layout, align, explicit, ids_of, merge
from ..operators import rule

Places = list[int | None]


def gather_colours(
    call: Call, operands: Sequence[tuple[Any, Places]], out: Tensor
) -> Layout | None:
    """Colours when every operand says where each of its axes goes (None: contracted)."""
    result: Layout | None = None
    known = set()
    for tensor, places in operands:
        known.add(id(tensor))
        layout = call.layout(tensor)
        if layout is not None:
            result = place(layout, tensor, places, out, result, call.n)
    if any(key not in known for key in call.layouts):
        raise Mixing(f"{call.name}: an argument holds samples that is shared by all rows")
    return result


def contracts_samples(call: Call, operands: Sequence[tuple[Any, Places]]) -> bool:
    """Whether all coloured operands hold their samples, alike, on one contracted axis."""
    found: list[tuple[Layout, Tensor]] = []
    for tensor, places in operands:
        layout = call.layout(tensor)
        if layout is not None:
            if len(layout.axes) != 1 or places[layout.axes[0]] is not None:
                return False
            found.append((layout, tensor))
    if all(layout.ids is None for layout, _ in found):
        return len({(layout.inner, t.shape[layout.axis]) for layout, t in found}) == 1
    rows = [ids_of(layout, t.shape, call.n, t.device).flatten() for layout, t in found]
    return bool((rows[0] >= 0).all()) and all(torch.equal(rows[0], other) for other in rows)


def batch(tensor: Tensor, core: int, out: Tensor, out_core: int) -> Places:
    """Places of leading axes, aligned from the right; the core axes come after."""
    lead, out_lead = tensor.dim() - core, out.dim() - out_core
    return [d - lead + out_lead for d in range(lead)]


def product(call: Call, a: Tensor, b: Tensor, out: Tensor) -> list[tuple[Any, Places]]:
    """Places of both operands of ``a @ b``."""
    rows, columns = a.dim() > 1, b.dim() > 1
    core = rows + columns
    places_a = batch(a, 2, out, core) + [out.dim() - core] if rows else []
    places_b = batch(b, 2, out, core) if columns else []
    left: Places = [*places_a, None]
    right: Places = [*places_b, None] + ([out.dim() - 1] if columns else [])
    return [(a, left), (b, right)]


@rule("matmul mm bmm mv dot vdot linalg_matmul ger outer rmatmul inner")
def matmul(call: Call) -> Result:
    """Rows of the left factor and columns of the right one keep their colours."""
    a, b = call.arg(0, "input", "self"), call.arg(1, "other", "mat2", "vec", "vec2", "tensor")
    out = call.out
    if call.name == "rmatmul":
        a, b = b, a
    if a.layout is not torch.strided:
        return sparse_product(call)  # type: ignore[return-value]
    if call.name in ("ger", "outer"):
        operands: list[tuple[Any, Places]] = [(a, [0]), (b, [1])]
    elif call.name == "inner":
        operands = _inner(a, b, out)
    else:
        operands = product(call, a, b, out)
    if contracts_samples(call, operands):
        return Additive()
    return gather_colours(call, operands, out)


@rule("linalg_multi_dot chain_matmul")
def multi_dot(call: Call) -> Result:
    """Rows of the first factor and columns of the last one keep their colours."""
    given = call.arg(0, "tensors", "matrices")
    factors = list(given) if isinstance(given, (list, tuple)) else list(call.args)
    first, last, out = factors[0], factors[-1], call.out
    operands: list[tuple[Any, Places]] = [(t, [None, None]) for t in factors[1:-1]]
    operands.append((first, [0, None] if first.dim() == 2 else [None]))
    operands.append((last, [None, out.dim() - 1] if last.dim() == 2 else [None]))
    return gather_colours(call, operands, out)


@rule("_sparse_mm")
def sparse_product(call: Call) -> Result:
    """A sparse constant from the left: a row is of the sample whose rows it adds up."""
    a, b, out = call.args[0], call.args[1], call.out
    layout = call.layout(b)
    if layout is None or call.layout(a) is not None:
        raise Mixing("the sparse factor of a product holds samples")
    if 0 not in layout.axes:
        return gather_colours(call, [(b, [None, *range(1, b.dim())])], out)
    if layout.axes != (0,):
        raise Mixing("a sparse product with samples on several axes")
    rows, columns = a.to_sparse_coo().coalesce().indices()
    colours = ids_of(layout, b.shape, call.n, b.device).flatten()[columns]
    found = torch.full((out.shape[0],), -1, device=b.device)
    found[rows] = colours
    if bool((found[rows] != colours).any()):
        raise Mixing("a row of the sparse factor adds up rows of several samples")
    return explicit(found.view(-1, *(1,) * (out.dim() - 1)), call.n)


def _inner(a: Tensor, b: Tensor, out: Tensor) -> list[tuple[Any, Places]]:
    if a.dim() == 0 or b.dim() == 0:
        return [(t, list(range(t.dim()))) for t in (a, b)]
    left = a.dim() - 1
    return [
        (a, [*range(left), None]),
        (b, [*range(left, left + b.dim() - 1), None]),
    ]


@rule("addmm addmv baddbmm addr addbmm sspaddmm")
def addmm(call: Call) -> Result:
    """A product plus something broadcast to it."""
    base, out = call.arg(0, "input", "self"), call.out
    a = call.arg(1, "mat1", "batch1", "mat", "vec1")
    b = call.arg(2, "mat2", "batch2", "vec", "vec2")
    if call.name == "addr":
        operands: list[tuple[Any, Places]] = [(a, [0]), (b, [1])]
    elif call.name == "addbmm":
        operands = [(a, [None, 0, None]), (b, [None, None, 1])]
    else:
        operands = product(call, a, b, out)
    layout, factors = call.layout(base), {id(a), id(b)}
    others = {key: v for key, v in call.layouts.items() if key != id(base) or key in factors}
    inner = Call(call.name, call.func, call.args, call.kwargs, out, others, call.n)
    result = gather_colours(inner, operands, out)
    if layout is None:
        return result
    moved = align(layout, base.shape, out.shape, call.n)
    return moved if result is None else merge(moved, result, out.shape, call.n)


@rule("linear")
def linear(call: Call) -> Result:
    """Rows of the input keep their colours."""
    x, weight, bias = call.arg(0, "input"), call.arg(1, "weight"), call.arg(2, "bias")
    last = call.out.dim() - 1
    places: Places = [*range(x.dim() - 1), None]
    columns: list[Places] = [[last, None], [None]]
    operands = [(x, places), (weight, columns[0] if weight.dim() == 2 else columns[1])]
    if bias is not None:
        operands.append((bias, [last] * bias.dim()))
    return gather_colours(call, operands, call.out)


@rule("bilinear")
def bilinear(call: Call) -> Result:
    """Two inputs, row by row."""
    a, b = call.arg(0, "input1"), call.arg(1, "input2")
    return carry(call, [(a, {a.dim() - 1}), (b, {b.dim() - 1})], call.out, {call.out.dim() - 1})


@rule("_grouped_mm grouped_mm", routes=True)
def grouped_mm(call: Call) -> Result:
    """Rows of a 2-D left factor keep their colours, whatever group they are in."""
    a, b, out = call.arg(0, "self", "input", "mat_a"), call.arg(1, "mat2", "mat_b"), call.out
    if a.dim() == 2 and b.dim() == 3:
        return gather_colours(call, [(a, [0, None])], out)
    if a.dim() == 3 and b.dim() == 3:
        return gather_colours(call, product(call, a, b, out), out)
    raise Mixing("this form of grouped matrix product sums over rows")


@rule("einsum")
def einsum(call: Call) -> Result:
    """The axis letter that holds the samples must reach the output."""
    equation = call.args[0]
    terms = call.args[1] if isinstance(call.args[1], (list, tuple)) else call.args[1:]
    if not isinstance(equation, str):
        raise Mixing("einsum in sublist form")
    operands = einsum_places(equation, terms, call.out)
    if contracts_samples(call, operands):
        if len(_sample_letters(call, equation, terms)) != 1:
            raise Mixing("sums over samples are multiplied with each other")
        return Additive()
    return gather_colours(call, operands, call.out)


def _sample_letters(call: Call, equation: str, terms: Sequence[Tensor]) -> set[str | int]:
    """The letters of the axes that hold samples; behind the dots, their number from the right."""
    found: set[str | int] = set()
    for term, tensor in zip(
        equation.replace(" ", "").split("->")[0].split(","), terms, strict=True
    ):
        layout = call.layout(tensor)
        if layout is not None:
            head, _, tail = term.partition("...")
            width = tensor.dim() - len(head) - len(tail)
            spelled = [*head, *range(-width, 0), *tail]
            found.add(spelled[layout.axes[0]])
    return found


def einsum_places(equation: str, terms: Sequence[Tensor], out: Tensor) -> list[tuple[Any, Places]]:
    """Where each axis of each term goes in the output."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        right = ("..." if "..." in left else "") + "".join(
            sorted(c for c in set(letters) if letters.count(c) == 1)
        )
    named = right.replace("...", "")
    dots = out.dim() - len(named)
    start = right.index("...") if "..." in right else len(right)
    position: dict[str, int] = {}
    for index, letter in enumerate(named):
        position[letter] = index if index < start else index + dots
    operands: list[tuple[Any, Places]] = []
    for term, tensor in zip(inputs, terms, strict=True):
        head, dotted, tail = term.partition("...")
        width = tensor.dim() - len(head) - len(tail)
        places: Places = [position.get(c) for c in head]
        if dotted:
            places += [start + dots - width + k if "..." in right else None for k in range(width)]
        places += [position.get(c) for c in tail]
        repeated = {c for c in head + tail if (head + tail).count(c) > 1}
        if repeated:  # a diagonal: only the other axes are followed
            spelled = [*head, *([""] * width if dotted else []), *tail]
            places = [None if c in repeated else p for c, p in zip(spelled, places, strict=True)]
        operands.append((tensor, places))
    return operands


@rule("tensordot")
def tensordot(call: Call) -> Result:
    """Free axes of the first factor, then those of the second."""
    a, b = call.arg(0, "a", "self"), call.arg(1, "b", "other")
    dims_a = axes(call.arg(2, "dims_self"), a.dim())
    dims_b = axes(call.arg(3, "dims_other"), b.dim())
    operands: list[tuple[Any, Places]] = []
    at = 0
    for tensor, gone in ((a, dims_a), (b, dims_b)):
        places: Places = []
        for d in range(tensor.dim()):
            places.append(None if d in gone else at)
            at += d not in gone
        operands.append((tensor, places))
    return gather_colours(call, operands, call.out)


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Result:
    """Leading axes are batch axes; queries keep their place, keys and values are summed over."""
    q, k, v = call.arg(0, "query"), call.arg(1, "key"), call.arg(2, "value")
    mask, out = call.arg(3, "attn_mask"), call.out
    rows, last = out.dim() - 2, out.dim() - 1
    operands: list[tuple[Any, Places]] = [
        (q, [*batch(q, 2, out, 2), rows, None]),
        (k, [*batch(k, 2, out, 2), None, None]),
        (v, [*batch(v, 2, out, 2), None, last]),
    ]
    if mask is not None:
        operands.append((mask, [*batch(mask, 2, out, 2), rows, None]))
    if call.arg(5, "is_causal", default=False):
        operands[0] = (q, [*batch(q, 2, out, 2), None, None])
    return gather_colours(call, operands, out)
