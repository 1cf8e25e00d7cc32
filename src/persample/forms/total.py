"""The sum of several forms of one parameter, cross terms included."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import torch
from torch import Tensor

from .apart import Apart, side_by_side
from .cost import Plan
from .dense import Dense
from .form import Form, wide
from .guard import restored
from .joint import Joint, joined
from .mapped import Mapped
from .outer import Outer
from .part import Part
from .pullback import Pullback
from .replay import Replay
from .rows import Rows, concatenated_rows
from .sketch import Sketch


class Total(Form):
    """gᵢ = Σᵤ gᵢ⁽ᵘ⁾ over the uses u of a parameter.

    ‖Σᵤ gᵤ‖² has cross terms: norms of uses are never added as they are, except where uses touch
    disjoint pieces of the parameter.
    """

    __slots__ = ("forms",)

    def __init__(self, forms: list[Form]) -> None:
        first = forms[0]
        dtype = max((f.dtype for f in forms), key=lambda d: d.itemsize)
        super().__init__(first.n, first.shape, dtype, first.device)
        self.forms = forms

    def tensors(self) -> list[Tensor]:
        """What the parts are made of."""
        return [t for f in self.forms for t in f.tensors()]

    def owns(self, rows: Tensor) -> bool:
        """If any part does."""
        return any(f.owns(rows) for f in self.forms)

    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(f.nbytes() for f in self.forms)

    def work(self) -> int:
        """That of all parts."""
        return sum(f.work() for f in self.forms)

    def plan(self) -> Plan:
        """The parts' own, and a cross term, where no rows are needed."""
        rows = super().plan()
        if self.tied() is None and not self.disjoint():
            return rows
        plans = [f.plan() for f in self.forms]
        ways = " + ".join(dict.fromkeys(p.way for p in plans))
        item = max(p.item for p in plans)
        flops, moved = sum(p.flops for p in plans), sum(p.moved for p in plans)
        return Plan(ways, flops, moved, item, self.n)

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
        return added([f.weighted_sum(c) for f in self.forms])

    def certain_sum(self, c: Tensor) -> Tensor:
        """Linear."""
        if self.tied() is not None:  # their certain sums are their weighted sums
            return self.weighted_sum(c)
        if not self.disjoint() and any(
            isinstance(f, (Joint, Pullback, Replay)) for f in self.forms
        ):
            # nothing tells how their rows are rounded: the very rows that the norms were taken of
            return Form.weighted_sum(self, c)
        return added([f.certain_sum(c) for f in self.forms])

    def dot(self, direction: Tensor) -> Tensor:
        """Linear."""
        return added([f.dot(direction) for f in self.forms])

    def project(self, sketch: Sketch) -> Tensor:
        """Linear."""
        return added([f.project(sketch) for f in self.forms])

    def dots(self, other: Form) -> Tensor:
        """Bilinear: every pair of parts."""
        others = other.forms if isinstance(other, Total) else [other]
        return added([f.dots(g) for f in self.forms for g in others])

    def sq_norms(self) -> Tensor:
        """An embedding tied to an output head has a cheap cross term; others are written out."""
        if self.tied() is None and not self.disjoint():
            return super().sq_norms()
        found, scale = self.estimated()
        return found if scale is found else restored(found, scale, self.exactly)

    def estimated(self) -> tuple[Tensor, Tensor]:
        """What can cancel within disjoint parts; tied ones have been written out where they do."""
        if self.tied() is not None:
            found = self.measured()[0]
            return found, found
        if self.disjoint():
            parts = [f.estimated() for f in self.forms]
            found = added([p[0] for p in parts])
            alike = all(scale is part for part, scale in parts)
            return found, found if alike else added([p[1] for p in parts])
        return super().estimated()

    def measured(self) -> tuple[Tensor, Tensor]:
        """Norms and bounds, each part looked at once.

        Disjoint parts have bounds of their own; else the triangle inequality guards rounding.
        """
        if self.disjoint():
            apart = [f.measured() for f in self.forms]
            return added([p[0] for p in apart]), added([p[1] for p in apart])
        parts = [f.certified() for f in self.forms]
        pair = self.tied()
        if pair is not None:
            cross = pair[0].cross(pair[1])
            found = torch.add(added([p[0] for p in parts]), cross, alpha=2).clamp_(min=0)
        else:
            found = super().sq_norms()
        sizes = added([p[1].sqrt() for p in parts])
        unit = torch.finfo(found.dtype).eps
        bound = self.enlarged(found) + 64 * unit * sizes.square()
        if pair is not None:  # what is not sure of either norm, or of their product, is not sure
            bound += (parts[0][1] - parts[0][0]) + (parts[1][1] - parts[1][0])
            one, two = (off + 8 * unit * size.sqrt() for _, size, off in parts)
            bound += one * two / (128 * unit)
            self._write_out(bound > found * (1 + 1e-3), found, bound)
        # the sum is rounded part by part, and so are the rows that the norm was taken of
        return found, (bound.sqrt() + 2 * added([p[2] for p in parts])).square()

    def rounding(self) -> Tensor:
        """That of all parts."""
        return added([f.rounding() for f in self.forms])

    def _write_out(self, loose: Tensor, found: Tensor, bound: Tensor) -> None:
        """Where cancellation within parts or between them left little, take the dense rows."""
        which = loose.nonzero().flatten()
        if which.numel():
            exact = self.exactly(which)
            found[which] = exact.to(found.dtype)
            bound[which] = (exact * (1 + 1e-6)).to(bound.dtype)

    def tied(self) -> tuple[Rows, Outer] | None:
        """An embedding and an output head of the same table, if that is all there is."""
        if len(self.forms) != 2 or self.dtype.is_complex:
            return None
        rows = [f for f in self.forms if isinstance(f, Rows)]
        outer = [f for f in self.forms if isinstance(f, Outer) and f.left.shape[1] == 1]
        if len(rows) == 1 and len(outer) == 1 and outer[0].left.shape[3] == self.shape[0]:
            return rows[0], outer[0]
        return None

    def disjoint(self) -> bool:
        """Whether the parts are pieces of the parameter that do not overlap."""
        if not all(isinstance(f, Part) for f in self.forms):
            return False
        ranges = sorted(f.span() for f in self.forms if isinstance(f, Part))
        return all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))


def total(forms: list[Form]) -> Form:
    """One form for one parameter: equal kinds are merged first."""
    if len(forms) == 1:
        return forms[0]
    merged: list[Form] = []
    outers: dict[tuple[int, ...], list[Outer]] = {}
    tables: list[Rows] = []
    dense: list[Dense] = []
    joint: list[Joint] = []
    apart: dict[int, list[Form]] = {}
    mapped: dict[Hashable, list[Mapped]] = {}
    for form in forms:
        if isinstance(form, Apart):
            for i, part in form.parts.items():
                apart.setdefault(i, []).append(part)
        elif isinstance(form, Outer):
            outers.setdefault(form.key(), []).append(form)
        elif isinstance(form, Rows):
            tables.append(form)
        elif isinstance(form, Dense):
            dense.append(form)
        elif isinstance(form, Joint):
            joint.append(form)
        elif isinstance(form, Mapped):
            mapped.setdefault(form.map(), []).append(form)
        else:
            merged.append(form)
    for group in outers.values():
        merged.append(group[0] if len(group) == 1 else _concatenated(group))
    if tables:
        merged.append(tables[0] if len(tables) == 1 else concatenated_rows(tables))
    if dense:
        merged.append(dense[0] if len(dense) == 1 else Dense(added([d.values for d in dense])))
    for alike in mapped.values():
        sums = alike[0].of(total([f.form for f in alike])) if len(alike) > 1 else alike[0]
        merged.append(sums)
    if joint:
        merged.append(joined(joint))
    if apart:
        own = {i: total(parts) for i, parts in sorted(apart.items())}
        merged.append(side_by_side(own, forms[0].n))
    return merged[0] if len(merged) == 1 else Total(merged)


def added(tensors: list[Tensor]) -> Tensor:
    """The sum of tensors."""
    out = tensors[0]
    for tensor in tensors[1:]:
        out = out + tensor
    return out


def _concatenated(forms: list[Outer]) -> Outer:
    """Several uses of one tensor are more positions of one form."""
    return Outer(
        torch.cat([f.left for f in forms], 2),
        torch.cat([f.right for f in forms], 2),
        forms[0].shape,
    )
