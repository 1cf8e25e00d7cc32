"""Pieces of a parameter that do not overlap: experts, slices, the blocks of a fused matrix.

Each piece is computed on its own and written straight to its place. Nothing of the parameter's size
is made for a piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..cost import Plan, all_of
from ..form import Form, Moments, add_all, real
from ..rounding import Norms
from ..sketch import Sketch
from ..strided_part import Part
from ..total import Total

_COMPARED = 64  # interleaved pieces up to which every pair is looked at


class Pieces(Total):
    """gᵢ is put together from forms of places that share no element, and zero elsewhere."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(parts)
        self.parts = list(parts)

    def plan(self) -> Plan:
        """The pieces' own."""
        return all_of([p.plan() for p in self.parts], self.n)

    def row_bytes(self) -> int:
        """A row, and the piece that is being written to it."""
        return super().row_bytes() + max(p.form.row_bytes() for p in self.parts)

    # ------------------------------------------------------------------ rows

    def add_to(self, out: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Each piece to its place."""
        for part in self.parts:
            part.add_to(out, first, last)
        return out

    # ------------------------------------------------------------------ norms

    def norms(self) -> Norms:
        """Those of the pieces, added: they share no element."""
        each = [p.norms() for p in self.parts]
        doubts = [found.doubt for found in each if found.doubt is not None]
        return Norms(
            add_all([found.value for found in each]),
            add_all(doubts) if doubts else None,
            self.sq_error,
            max(found.units for found in each) + len(each),
            rows=any(found.rows for found in each),
            exact=lambda which: add_all([found.again(which) for found in each]),
        )

    def sq_error(self) -> Tensor | None:
        """That of all pieces."""
        found = [error for part in self.parts if (error := part.sq_error()) is not None]
        return add_all(found) if found else None

    # ------------------------------------------------------------------ sums and products

    def moments(self, dtype: torch.dtype | None = None) -> Moments:
        """Every piece's in their places."""
        first, second = self.no_moments(dtype)
        for part in self.parts:
            one, two = part.form.moments(dtype)
            part.region(first).copy_(one)
            part.region(second).copy_(two)
        return first, second

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
    """Whether no element is named by two parts: by their spans, or as boxes of the parameter."""
    spans = sorted(p.span() for p in parts)
    if all(a[1] <= b[0] for a, b in itertools.pairwise(spans)):
        return True
    boxes = [p.box() for p in parts[: _COMPARED + 1]]
    if len(boxes) > _COMPARED:
        return False
    return all(
        a is not None and b is not None and _disjoint_boxes(a, b)
        for a, b in itertools.combinations(boxes, 2)
    )


def _disjoint_boxes(a: Sequence[range], b: Sequence[range]) -> bool:
    """Whether two boxes have no common index on one of the axes."""
    return any(x.stop <= y.start or y.stop <= x.start for x, y in zip(a, b, strict=True))
