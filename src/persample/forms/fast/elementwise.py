"""Weights that are a parameter times constants: pruning masks, masked layers, learning-rate scales.

The parameter's gradients are those of the weight times the same constants, element by element.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ..cost import Plan, spans
from ..dense import Dense
from ..form import Form, Moments, real, wide
from ..mapped import Mapped
from ..outer import Outer
from ..patches import Patches
from ..position_products import widen
from ..rounding import Norms, add_errors, units
from ..sketch import Sketch
from ..table_rows import Rows

_TILE = 4 << 20  # bytes of rows that stay in cache between two passes


class Scaled(Mapped):
    """gᵢ = M ∘ hᵢ; ``factor`` M is one number (no axes) or has the shape of hᵢ.

    M is real, in the dtype of sums, and no one else writes to it. ``key`` identifies it.
    """

    __slots__ = ("factor", "key")

    def __init__(self, form: Form, factor: Tensor, key: Hashable, dtype: torch.dtype) -> None:
        super().__init__(form, form.shape, dtype, form.device)
        self.factor, self.key = factor, key

    def of(self, form: Form) -> Scaled:
        """The same constants for another form."""
        return Scaled(form, self.factor, self.key, self.dtype)

    def converted(self, dtype: torch.dtype) -> Scaled:
        """From converted factors of the inner form."""
        return self.of(self.form.converted(dtype))

    def map(self) -> Hashable:
        """The constants."""
        return Scaled, self.key, self.shape, self.dtype

    @property
    def uniform(self) -> bool:
        """Whether M is one number."""
        return self.factor.dim() == 0

    @property
    def certain(self) -> bool:
        """Whether the inner form knows how its sums are rounded."""
        return self.uniform or isinstance(self.form, (Dense, Outer, Patches))

    def row_bytes(self) -> int:
        """The inner form's, and a row unless products take its place."""
        return self.form.row_bytes() + (0 if self._in_place else super().row_bytes())

    @property
    def _in_place(self) -> bool:
        return isinstance(self.form, (Outer, Patches))

    def plan(self) -> Plan:
        """The inner form's own for one number, one product for one position, else rows."""
        if self.uniform:
            return self.form.plan()
        one = self._one_position()
        if one is None:
            return super().plan()
        a, b = one.left.shape[3], one.right.shape[3]
        item = one.left.shape[1] * 2 * (a + b) * wide(self.dtype).itemsize
        return Plan("product of squares", self.n * self.size, self.n * item, item, self.n)

    def _one_position(self) -> Outer | None:
        form = self.form
        return form if isinstance(form, Outer) and form.t == 1 else None

    # ------------------------------------------------------------------ rows

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """The inner rows times M, in place where they are new."""
        rows = self.form.wide_dense(first, last)
        new = self._in_place and not rows._is_zerotensor()
        return rows.mul_(self.factor) if new else rows * self.factor

    # ------------------------------------------------------------------ norms

    def norms(self) -> Norms:
        """By the inner form's norms, by one product of squares, or by rows."""
        if self.uniform:
            return self._norms_of_one_number()
        one = self._one_position()
        if one is None:  # rows are rounded as sums are
            found = self.norms_of_rows(4 * _TILE)
            return found._replace(exact=self.exact_sq_norms) if self.certain else found
        value, lost = self._by_squares(one)
        return Norms(value, lost, units=units(one.left.shape[3]) + units(one.right.shape[3]) + 16)

    def _norms_of_one_number(self) -> Norms:
        """The inner ones times M², which may be too small a number on its own."""
        found, factor = self.form.norms(), self.factor.abs()
        tiny = 4 * self.size * torch.finfo(real(self.dtype)).tiny

        def times(squares: Tensor) -> Tensor:
            return (squares.sqrt() * factor).square_()

        def sq_error() -> Tensor | None:
            inner, vanished = found.sq_error(), times(torch.full_like(found.value, tiny))
            return add_errors([None if inner is None else times(inner), vanished])

        def exactly(which: Tensor) -> Tensor:
            return found.again(which) * factor.double().square()

        doubt = None if found.doubt is None else times(found.doubt)
        exact = None if found.exact is None else exactly
        value, units = times(found.value), found.units + 8
        return found._replace(value=value, doubt=doubt, sq_error=sq_error, units=units, exact=exact)

    def sq_error(self) -> Tensor | None:
        """That of the inner form, times the largest number of M."""
        sq_error = self.form.sq_error()
        if sq_error is None or not self.factor.numel():
            return sq_error
        return (sq_error.sqrt() * self.factor.abs().amax()).square_()

    def _by_squares(self, one: Outer) -> tuple[Tensor, Tensor]:
        """‖M ∘ (l ⊗ r)‖² = l² · M² r², and what vanished squares may hide."""
        (_, k, _, a), b = one.left.shape, one.right.shape[3]
        squares = self.factor.reshape(k, a, b).square().mT  # (k, b, a)
        tiny = torch.finfo(squares.dtype).tiny
        most = squares.sum(1).amax() if squares.numel() else squares.sum()
        out = squares.new_zeros(2, self.n)
        item = 2 * k * (a + b) * squares.element_size()
        for first, last in spans(self.n if squares.numel() else 0, item):
            left, right = widen(one.left, one.right, first, last)
            left, right = left[:, :, 0].square(), right[:, :, 0].square()
            product = torch.matmul(right.transpose(0, 1), squares).transpose(0, 1)  # (n, k, a)
            slack = tiny * (right.sum(2) + most + b)
            lost = left.sum(2).mul_(slack) + tiny * (product.sum(2) + a * slack + a)
            out[0, first:last] = product.mul_(left).sum((1, 2))
            out[1, first:last] = lost.sum(1)
        return out[0], out[1]

    # ------------------------------------------------------------------ sums and products

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """M times the inner sum, or the sum of the rows that norms were computed from."""
        if certain and not self.certain:
            return super().weighted_sum(c)
        return self.form.weighted_sum(c, certain=certain) * self.factor

    def dot(self, direction: Tensor) -> Tensor:
        """⟨M ∘ hᵢ, V⟩ = ⟨hᵢ, M ∘ V⟩."""
        return self.form.dot(direction.to(self.factor.dtype) * self.factor)

    def dots(self, other: Form) -> Tensor:
        """One number comes before the inner products."""
        if not self.uniform:
            return super().dots(other)
        if isinstance(other, Scaled) and other.uniform:
            return self.form.dots(other.form) * self.factor * other.factor
        return self.form.dots(other) * self.factor

    def project(self, sketch: Sketch) -> Tensor:
        """One number comes before the sketch."""
        if not self.uniform:
            return super().project(sketch)
        return self.form.project(sketch) * self.factor

    def moments(self, dtype: torch.dtype | None = None) -> Moments:
        """M and M² times the inner ones."""
        first, second = self.form.moments(dtype)
        factor = self.factor.to(second.dtype)
        return first * factor, second * factor.square()


def scale_form(form: Form, factor: Tensor, key: Hashable, dtype: torch.dtype) -> Form:
    """M ∘ hᵢ for a parameter of this dtype; of a table, by its rows of M."""
    if isinstance(form, Rows) and factor.dim() and form.dtype == factor.dtype == dtype:
        sample, index = None if form.even else form.sample, form.index
        values = form.values * factor.index_select(0, index)
        return Rows(sample, index, values, form.n, form.shape)
    return Scaled(form, factor, key, dtype)
