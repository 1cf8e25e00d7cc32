"""Gradients of many small tensors, asked together: a few kernels answer for all of them.

A question to each on its own costs more in calls than in arithmetic. What is written out in a few
calls is put side by side as rows. Linear layers with one position per sample are asked by their
factors, whatever their sizes: ‖gᵢ‖² = ‖lᵢ‖²(‖rᵢ‖² + 1) if there is a bias, whose gradient is lᵢ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..cost import JOINED, WORK, WRITTEN, scratch
from ..dense import Dense
from ..form import Form, row_sq_norms
from ..matrix_products import sum_products
from ..outer import Outer
from ..patches import Patches
from ..rounding import Norms, fine_dtype, units
from ..table_rows import Rows
from ..total import Total
from .joined_positions import Sequences, by_positions

Forms = dict[str, Form]


class Joined(Form):
    """Gradients of several tensors, asked together; ``names`` are theirs."""

    __slots__ = ("names",)

    def __init__(self, n: int, names: Sequence[str], like: Tensor) -> None:
        super().__init__(n, torch.Size(), like.dtype, like.device)
        self.names = names

    def sums(self, c: Tensor) -> dict[str, Tensor]:
        """Σᵢ cᵢ gᵢ of every tensor."""
        raise NotImplementedError


class Stacked(Joined):
    """Rows that hold one tensor's elements after the other's."""

    __slots__ = ("rows_of_all", "shapes")

    def __init__(self, rows: Tensor, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__(rows.shape[0], [*shapes], rows)
        self.rows_of_all, self.shapes = rows, shapes

    def without(self, bad: Tensor) -> Stacked:
        """Zero rows for some samples."""
        return Stacked(self.rows_of_all.masked_fill(bad.unsqueeze(1), 0), self.shapes)

    def norms(self) -> Norms:
        """Those of all tensors together."""
        rows = self.rows_of_all
        return Norms(row_sq_norms(rows), units=units(rows.shape[1]))

    def sums(self, c: Tensor) -> dict[str, Tensor]:
        """One matrix-vector product."""
        sums = torch.mv(self.rows_of_all.T, c.to(self.dtype))
        parts = sums.split([shape.numel() for shape in self.shapes.values()])
        named = zip(parts, self.shapes.items(), strict=True)
        return {name: x if len(shape) == 1 else x.view(shape) for x, (name, shape) in named}


class Size(NamedTuple):
    """Linear layers of one size, by their names: factors (n, a) and (n, b) of one of them.

    Of several, they are side by side: (k, n, a) and (k, n, b).
    """

    left: Tensor
    right: Tensor
    weights: Sequence[str]
    biases: Sequence[str] = ()


class Layers(Joined):
    """Linear layers with one position per sample; sizes with biases come first."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: Sequence[Size]) -> None:
        names = [name for size in sizes for name in (*size.weights, *size.biases)]
        super().__init__(sizes[0].left.shape[-2], names, sizes[0].left)
        self.sizes = sizes

    def without(self, bad: Tensor) -> Layers:
        """Zero factors for some samples."""
        bad = bad.unsqueeze(1)
        return Layers(
            [s._replace(left=s.left.masked_fill(bad, 0), right=s.right.masked_fill(bad, 0))
             for s in self.sizes]
        )  # fmt: skip

    def norms(self) -> Norms:
        """Nothing can cancel; squares in double precision neither vanish nor overflow."""
        fine, sizes = fine_dtype(self.device), self.sizes
        left, right = [
            torch.vstack([torch.linalg.vector_norm(size[k], dim=-1, dtype=fine) for size in sizes])
            for k in (0, 1)
        ]
        biased = sum([len(size.biases) for size in sizes])
        parts = [left * right, left if biased == left.shape[0] else left[:biased]]
        value = torch.linalg.vector_norm(torch.cat(parts), dim=0).to(self.dtype).square_()
        lost, most = None, max([max(size.left.shape[-1], size.right.shape[-1]) for size in sizes])
        if fine is self.dtype:  # a vanished square may be multiplied by a huge one
            squares = torch.cat([left, right]).square_().sum(0)
            lost = squares.mul_(2 * most * torch.finfo(fine).tiny)
        return Norms(value, lost, units=48 + most / 4 + left.shape[0])

    def sums(self, c: Tensor) -> dict[str, Tensor]:
        """(c ∘ left)ᵀ right of every layer, and the sum of c ∘ left for its bias."""
        found: dict[str, Tensor] = {}
        c = c.to(self.dtype).unsqueeze(1)
        for left, right, weights, biases in self.sizes:
            left = left * c
            found |= _by_name(weights, sum_products(left, right))
            if biases:
                found |= _by_name(biases, left.sum(-2))
        return found


def _by_name(names: Sequence[str], sums: Tensor) -> dict[str, Tensor]:
    """Sums of layers side by side, or of one layer."""
    return {names[0]: sums} if len(names) == 1 else dict(zip(names, sums.unbind(), strict=True))


Layer = tuple[Tensor, Tensor, Sequence[str]]  # left and right factor, names of weight and bias


def join_layers(layers: Iterable[Layer]) -> Forms:
    """Layers of factors (n, a) and (n, b), of one dtype side by side, under their first name."""
    alike: dict[Any, dict[Any, list[Layer]]] = {}
    for layer in layers:
        left, right, names = layer
        sizes = alike.setdefault((left.dtype, left.device), {})
        sizes.setdefault((len(names), left.shape[1], right.shape[1]), []).append(layer)
    found: Forms = {}
    for some in alike.values():
        joined = Layers([_side_by_side(some[size]) for size in sorted(some, reverse=True)])
        found[joined.names[0]] = joined
    return found


def _side_by_side(layers: Sequence[Layer]) -> Size:
    """Layers of one size."""
    lefts, rights, names = zip(*layers, strict=True)
    left, right = [s[0] if len(layers) == 1 else torch.stack(s) for s in (lefts, rights)]
    return Size(left, right, *zip(*names, strict=True))


class Kinds(NamedTuple):
    """Forms by what is joined with what: none, products of one position, of several, and rows."""

    alone: Forms
    products: dict[str, Outer]
    sequences: list[dict[str, Outer]]
    rows: list[Forms]


def _kinds(forms: Mapping[str, Form], *, squares: bool, sums: bool) -> Kinds:
    """Those of one dtype are joined.

    A product on its own is written out if it is small; others where ``squares`` are asked for, and
    products of positions are not enough because ``sums`` follow. Copies take a quarter of the
    budget at most.
    """
    alone: Forms = {}
    products: dict[str, Outer] = {}
    rows: dict[Any, Forms] = {}
    room = scratch() // 4
    for name, form in forms.items():
        dtype = form.dtype
        size = _copied(form, squares) * dtype.itemsize if dtype in _DTYPES else 0
        if not 0 < size <= room:
            alone[name] = form
            continue
        room -= size
        if _is_product(form):
            products[name] = form
        else:
            rows.setdefault((dtype, form.device), {})[name] = form
    if len(products) == 1:
        name, one = products.popitem()
        short = one.n * one.size <= JOINED
        (rows.setdefault((one.dtype, one.device), {}) if short else alone)[name] = one
    sequences = []
    for some in () if sums else rows.values():
        for alike in by_positions(some):
            sequences.append(alike)
            for name in alike:
                del some[name]
    return Kinds(alone, products, sequences, [some for some in rows.values() if some])


def stack_forms(forms: Mapping[str, Form], *, squares: bool = True, sums: bool = True) -> Forms:
    """The same forms, small ones of one dtype and device joined under the first one's name.

    Sums alone are computed from the factors of what ``squares`` would be taken of as rows.
    """
    found, products, sequences, rows = _kinds(forms, squares=squares, sums=sums)
    found |= join_layers([(*form.given, (name,)) for name, form in products.items()])
    found |= {next(iter(some)): Sequences([*some.values()]) for some in sequences}
    for some in rows:
        if len(some) == 1:
            found |= some
            continue
        each = [form.dense() for form in some.values()]
        flat = torch.cat([x if x.dim() == 2 else x.reshape(x.shape[0], -1) for x in each], 1)
        found[next(iter(some))] = Stacked(flat, {name: form.shape for name, form in some.items()})
    return found


def name_joined(forms: Mapping[str, Form]) -> dict[str, str]:
    """How norms of forms that are joined with others are computed."""
    _, products, sequences, rows = _kinds(forms, squares=True, sums=False)
    found = dict.fromkeys(products, "one position, joined")
    found |= {name: "gram, joined" for some in sequences for name in some}
    for some in rows:
        for name, form in some.items() if len(some) > 1 else ():
            found[name] = "stored rows, joined" if isinstance(form, Dense) else "rows, joined"
    return found


def _is_product(form: Form) -> TypeGuard[Outer]:
    """Whether a form is an outer product of one position and one block, shaped as a matrix."""
    if type(form) is not Outer or form.given[0].dim() != 2:
        return False
    return form.shape == (form.given[0].shape[1], form.given[1].shape[1])


def _copied(form: Form, written: bool) -> int:
    """Elements that are copied to join a form with others; 0 if it is not small."""
    most = JOINED
    if type(form) is Dense:
        count = form.values.numel()
    elif _is_product(form):
        count = form.given[0].numel() + form.given[1].numel()
    elif written and _is_written(form) and form.work() <= WORK:
        count, most = form.n * form.size, WRITTEN
    else:
        return 0
    return count if count <= most else 0


def _is_written(form: Form) -> bool:
    """Whether rows are written out in a few calls."""
    parts = form.forms if type(form) is Total else [form]
    return _IN_A_FEW_CALLS.issuperset([type(part) for part in parts])


_DTYPES = (torch.float32, torch.float64)
_IN_A_FEW_CALLS = {Outer, Patches, Rows}
