"""The sum of several forms of one parameter, cross terms included."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cost import Plan, all_of
from .fast.disjoint_parts import Pieces
from .fast.elementwise import Scaled
from .form import Form, add_all, flat_rows, wide
from .mapped import Composite
from .masked import Masked
from .outer import Outer
from .pullback import Pullback
from .replay import Replay
from .rounding import Norms, add_slips, units
from .sketch import Sketch
from .strided_part import Part
from .table_rows import Rows
from .user_maps import Joint


class Total(Composite):
    """gᵢ = Σᵤ gᵢ⁽ᵘ⁾ over the uses u of a parameter.

    ‖Σᵤ gᵤ‖² has cross terms: norms of uses are never added as they are. Uses that touch disjoint
    pieces of the parameter are :class:`Pieces`.
    """

    __slots__ = ()

    def __init__(self, forms: list[Form]) -> None:
        first = forms[0]
        dtype = max((f.dtype for f in forms), key=lambda d: d.itemsize)
        super().__init__(forms, first.n, first.shape, dtype, first.device)

    def plan(self) -> Plan:
        """The parts' own, and a cross term, where no rows are needed."""
        rows = super().plan()
        if self.tied() is None:
            return rows
        return all_of([f.plan() for f in self.forms], self.n)

    def row_bytes(self) -> int:
        """All parts' rows."""
        return super().row_bytes() + max(f.row_bytes() for f in self.forms)

    def without(self, bad: Tensor) -> Total:
        """Zero gradients for some samples."""
        return Total([f.without(bad) for f in self.forms])

    def narrowed(self, first: int, last: int) -> Total:
        """Some samples of all parts."""
        return Total([f.narrowed(first, last) for f in self.forms])

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """The parts' rows, added."""
        return self.wide_dense(first, last).to(self.dtype)

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """The parts' wide rows, added in place: a table's rows come last."""
        main, *others = sorted(self.forms, key=lambda form: isinstance(form, Rows))
        out = main.wide_dense(first, last).to(wide(self.dtype)).contiguous()
        out = out.clone() if main.owns(out) else out
        for form in others:
            form.add_to(out, first, last)
        return out

    def weighted_sum(self, c: Tensor) -> Tensor:
        """Linear: the parts' sums, added."""
        pair = self.tied()
        if pair is not None and wide(pair[0].dtype) == wide(pair[1].dtype):
            rows, outer = pair
            return rows.add_sum(outer.weighted_sum(c), c)
        return self._summed(lambda form: form.weighted_sum(c))

    def certain_sum(self, c: Tensor) -> Tensor:
        """Linear."""
        if self.tied() is not None:  # their certain sums are their weighted sums
            return self.weighted_sum(c)
        if any(_rounded_unseen(form) for form in self.forms):
            return Form.weighted_sum(self, c)  # the very rows that the norms were computed from
        return self._summed(lambda form: form.certain_sum(c))

    def _summed(self, ask: Callable[[Form], Tensor]) -> Tensor:
        """The parts' sums; those of pieces are added to their places."""
        whole = [ask(f) for f in self.forms if not isinstance(f, Part)]
        if len(whole) == len(self.forms):
            return add_all(whole)
        out = torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        for value in whole:
            out += value
        for form in self.forms:
            if isinstance(form, Part):
                form.region(out).add_(ask(form.form))
        return out

    def dot(self, direction: Tensor) -> Tensor:
        """Linear."""
        return add_all([f.dot(direction) for f in self.forms])

    def project(self, sketch: Sketch) -> Tensor:
        """Linear."""
        return add_all([f.project(sketch) for f in self.forms])

    def dots(self, other: Form) -> Tensor:
        """Bilinear: every pair of parts."""
        others = other.forms if isinstance(other, Total) else [other]
        return add_all([_between(f, g) for f in self.forms for g in others])

    def norms(self) -> Norms:
        """An embedding tied to an output head has a cheap cross term; others are written out.

        The triangle inequality guards rounding: the sum is rounded part by part, and so are the
        rows that the norm was computed from.
        """
        parts, pair = [f.norms() for f in self.forms], self.tied()
        value = super().norms().value if pair is None else self._add_cross(parts, *pair)
        unit, bounds = torch.finfo(value.dtype).eps, [p.bounds() for p in parts]
        lengths = [bound.sqrt() for bound in bounds]
        sizes = add_all(lengths)
        doubt = sizes.square().mul_(64 * unit)
        slips = [
            torch.zeros_like(value) if s is None else s.sqrt() for s in (p.slip() for p in parts)
        ]
        if pair is not None:  # what is not sure of either norm, or of their product, is not sure
            doubt += add_all([bound - p.value for bound, p in zip(bounds, parts, strict=True)])
            one, two = (s + 8 * unit * size for s, size in zip(slips, lengths, strict=True))
            doubt += one * two / (128 * unit)
        slip = (2 * add_all(slips) + 8 * unit * sizes).square_()
        exact = None if pair is None else self._exactly
        return Norms(value, doubt, lambda: slip, units(self.size), exact=exact)

    def _add_cross(self, parts: list[Norms], rows: Rows, outer: Outer) -> Tensor:
        return add_all([p.value for p in parts]).add(rows.cross(outer), alpha=2).clamp_(min=0)

    def _exactly(self, which: Tensor) -> Tensor:
        """‖gᵢ‖² of a few samples: from their rows, which cancel before they are squared."""
        rows = [flat_rows(self.wide_dense(i, i + 1)).double() for i in which.tolist()]
        return torch.cat([r.square().sum(1) for r in rows])

    def slip(self) -> Tensor | None:
        """That of all parts."""
        return add_slips([f.slip() for f in self.forms])

    def tied(self) -> tuple[Rows, Outer] | None:
        """An embedding and an output head of the same table, if that is all there is."""
        if len(self.forms) != 2 or self.dtype.is_complex:
            return None
        rows = [f for f in self.forms if isinstance(f, Rows)]
        outer = [f for f in self.forms if isinstance(f, Outer) and f.left.shape[1] == 1]
        if len(rows) == 1 and len(outer) == 1 and outer[0].left.shape[3] == self.shape[0]:
            return rows[0], outer[0]
        return None


def _rounded_unseen(form: Form) -> bool:
    """Whether it is not known how a form's rows are rounded."""
    if isinstance(form, Part):
        return _rounded_unseen(form.form)
    if isinstance(form, Scaled):
        return not form.certain or _rounded_unseen(form.form)
    if isinstance(form, Pieces):
        return any(_rounded_unseen(part) for part in form.parts)
    return isinstance(form, (Joint, Masked, Pullback, Replay))


def _between(form: Form, other: Form) -> Tensor:
    """⟨gᵢ, hⱼ⟩ by the form that knows where it is zero."""
    if isinstance(other, Rows) and not isinstance(form, Rows):
        return other.dots(form).T
    return form.dots(other)
