"""The sum of several forms of one parameter, cross terms included.

Pieces that do not overlap (experts, slices, the blocks of a fused matrix) have none: each is
computed on its own and written straight to its place. Nothing of the size of the parameter is made
for a piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .cost import Plan, all_of
from .fast.elementwise import Scaled
from .form import Form, add_all, real, wide
from .mapped import Composite, Masked, Part
from .outer import Outer
from .pullback import Joint, Pullback, Replay
from .rounding import Norms, add_errors, units
from .sketch import Sketch
from .table_rows import Rows


class Total(Composite):
    """gᵢ = Σᵤ gᵢ⁽ᵘ⁾ over the uses u of a parameter.

    ‖Σᵤ gᵤ‖² has cross terms: norms of uses are never added as they are. Uses that touch disjoint
    pieces of the parameter are :class:`persample.forms.Pieces`.
    """

    __slots__ = ()

    def __init__(self, forms: Sequence[Form]) -> None:
        first = forms[0]
        dtype = max((f.dtype for f in forms), key=lambda d: d.itemsize)
        super().__init__(forms, first.n, first.shape, dtype, first.device)

    def plan(self) -> Plan:
        """The parts' own, and a cross term, where no rows are needed."""
        tied = self.tied() is not None
        return all_of([f.plan() for f in self.forms], self.n) if tied else super().plan()

    def row_bytes(self) -> int:
        """All parts' rows."""
        return super().row_bytes() + max(f.row_bytes() for f in self.forms)

    def without(self, bad: Tensor) -> Total:
        """Zero gradients for some samples."""
        return type(self)([f.without(bad) for f in self.forms])

    def narrowed(self, first: int, last: int) -> Total:
        """Some samples of all parts."""
        return type(self)([f.narrowed(first, last) for f in self.forms])

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """The parts' wide rows, added in place: a table's rows come last."""
        main, *others = sorted(self.forms, key=lambda form: isinstance(form, Rows))
        out = main.wide_dense(first, last).to(wide(self.dtype)).contiguous()
        out = out.clone() if main.owns(out) else out
        for form in others:
            form.add_to(out, first, last)
        return out

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """Linear: the parts' sums, added in place; those of pieces and of a table's rows last."""
        if certain and any(_rounded_unseen(form) for form in self.forms):
            return super().weighted_sum(c)  # the very rows that the norms were computed from
        main, *others = sorted(self.forms, key=lambda form: isinstance(form, (Part, Rows)))
        out = main.weighted_sum(c, certain=certain).to(wide(self.dtype)).contiguous()
        out = out.clone() if _rounded_unseen(main) else out  # code of the user's may keep it
        for form in others:
            form.add_sum(out, c, certain=certain)
        return out

    def dot(self, direction: Tensor) -> Tensor:
        """Linear."""
        return add_all([f.dot(direction) for f in self.forms])

    def project(self, sketch: Sketch) -> Tensor:
        """Linear."""
        return add_all([f.project(sketch) for f in self.forms])

    def dots(self, other: Form) -> Tensor:
        """Bilinear: every pair of parts; with itself, those of two different ones only once."""
        if other is self:
            pairs = itertools.combinations(self.forms, 2)
            crossed = [_between(f, g) for f, g in pairs]
            return add_all([*(f.dots(f) for f in self.forms), *crossed, *(m.T for m in crossed)])
        others = other.forms if type(other) is Total else [other]
        return add_all([_between(f, g) for f in self.forms for g in others])

    def norms(self) -> Norms:
        """An embedding tied to an output head has a cheap cross term; others are written out."""
        pair = self.tied()
        return (
            self.norms_of_rows()._replace(rows=False) if pair is None else self._tied_norms(*pair)
        )

    def sq_error(self) -> Tensor | None:
        """Sums are rounded part by part, and so are the rows that norms were computed from."""
        return self._sq_error([f.norms().kept() for f in self.forms])

    def _sq_error(self, parts: list[Norms]) -> Tensor:
        """Twice that of all parts, and what is lost where they are added up."""
        sizes = add_all([p.bounds().sqrt_() for p in parts])
        sizes *= (8 + 4 * len(parts)) * torch.finfo(sizes.dtype).eps
        off = add_errors([p.sq_error() for p in parts])
        return sizes.square_() if off is None else (2 * off.sqrt_()).add_(sizes).square_()

    def _tied_norms(self, rows: Rows, outer: Outer) -> Norms:
        """What is not sure of either norm, or of their product, is not sure."""
        parts = [rows.norms().kept(), outer.norms().kept()]
        value = torch.add(parts[0].value, parts[1].value).add_(rows.cross(outer), alpha=2)
        bounds, unit = [p.bounds() for p in parts], torch.finfo(value.dtype).eps
        sizes, sq_errors = [b.sqrt() for b in bounds], [p.sq_error() for p in parts]
        doubt = add_all(sizes).square_().mul_(64 * unit)
        doubt += add_all([b - p.value for b, p in zip(bounds, parts, strict=True)])
        offs = [8 * unit * size for size in sizes]
        for off, sq_error in zip(offs, sq_errors, strict=True):
            if sq_error is not None:
                off += sq_error.sqrt()
        doubt += offs[0].mul_(offs[1]).div_(128 * unit)
        return Norms(
            value.clamp_(min=0), doubt, lambda: self._sq_error(parts), units(self.size),
            exact=self.exact_sq_norms,
        )  # fmt: skip

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
    if isinstance(form, Total):
        return any(_rounded_unseen(part) for part in form.forms)
    return isinstance(form, (Joint, Masked, Pullback, Replay))


def _between(form: Form, other: Form) -> Tensor:
    """⟨gᵢ, hⱼ⟩ by the form that knows where it is zero."""
    if isinstance(other, Rows) and not isinstance(form, Rows):
        return other.dots(form).T
    return form.dots(other)


class Pieces(Total):
    """gᵢ is put together from forms of places that share no element, and zero elsewhere."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(parts)
        self.parts = list(parts)

    def plan(self) -> Plan:
        """The pieces' own."""
        return all_of([p.plan() for p in self.parts], self.n)

    # ------------------------------------------------------------------ rows

    def add_to(self, out: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Each piece to its place."""
        for part in self.parts:
            part.add_to(out, first, last)
        return out

    # ------------------------------------------------------------------ sums and products

    def project(self, sketch: Sketch) -> Tensor:
        """From rows of all pieces."""
        return Form.project(self, sketch)

    def dots(self, other: Form) -> Tensor:
        """Piece by piece where both have the same pieces; others add nothing."""
        if not isinstance(other, Pieces):
            return Form.dots(self, other)
        theirs = {p.map(): p for p in other.parts}
        pairs = [(p, theirs.pop(p.map(), None)) for p in self.parts]
        alone = [p for p, q in pairs if q is None]
        if alone and theirs and not disjoint([*alone, *theirs.values()]):
            return Form.dots(self, other)
        out = torch.zeros(self.n, other.n, dtype=real(self.dtype), device=self.device)
        for mine, same in pairs:
            if same is not None:
                out += mine.form.dots(mine.form if other is self else same.form)
        return out


def disjoint(parts: Sequence[Part]) -> bool:
    """Whether no element is named by two parts."""
    spans = sorted(p.span() for p in parts)
    if all(a[1] <= b[0] for a, b in itertools.pairwise(spans)):
        return True
    named = torch.zeros(parts[0].shape, dtype=torch.bool, device="cpu")
    for part in parts:
        region = part.region(named)
        if bool(region.any()):
            return False
        region.fill_(True)
    return True
