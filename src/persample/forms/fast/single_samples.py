"""Samples that were computed one by one: a form of its own for each of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..cost import Plan, all_of
from ..dense import Dense
from ..form import Form, real, wide
from ..mapped import Composite
from ..outer import Outer
from ..patches import Patches
from ..rounding import Norms
from ..sketch import Sketch


class SingleSamples(Composite):
    """gᵢ is the only gradient of the form ``parts[i]``, or zero where there is none."""

    __slots__ = ("parts",)

    def __init__(self, parts: Mapping[int, Form], n: int, like: Form) -> None:
        super().__init__([*parts.values()], n, like.shape, like.dtype, like.device)
        self.parts = dict(parts)

    # ------------------------------------------------------------------ what it is made of

    def plan(self) -> Plan:
        """Each part's own."""
        return all_of([part.plan() for part in self.parts.values()], len(self.parts))

    def without(self, bad: Tensor) -> SingleSamples:
        """Zero gradients for some samples."""
        parts = {i: part.without(bad[i : i + 1]) for i, part in self.parts.items()}
        return SingleSamples(parts, self.n, self)

    def narrowed(self, first: int, last: int) -> SingleSamples:
        """Some samples' forms."""
        parts = {i - first: part for i, part in self.parts.items() if first <= i < last}
        return SingleSamples(parts, last - first, self)

    # ------------------------------------------------------------------ rows

    def wide_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Every form's rows added to zeros, in float32 at least."""
        count = (self.n if last is None else last) - first
        out = torch.zeros(count, *self.shape, dtype=wide(self.dtype), device=self.device)
        return self.add_to(out, first, last)

    def add_to(self, out: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Each part to its own row."""
        for i, part in self.parts.items():
            if first <= i < (self.n if last is None else last):
                part.add_to(out[i - first : i - first + 1])
        return out

    # ------------------------------------------------------------------ one number for each

    def _each(self, answers: Mapping[int, Tensor | None], *shape: int) -> Tensor:
        """Answers of single samples in their places; zero where there is none."""
        out = torch.zeros(self.n, *shape, dtype=real(self.dtype), device=self.device)
        known = {i: answer for i, answer in answers.items() if answer is not None}
        if known:
            where = torch.tensor(list(known), device=self.device)
            out[where] = torch.cat(list(known.values())).to(out.dtype)
        return out

    def norms(self) -> Norms:
        """Each part's, looked at once."""
        each = {i: part.norms() for i, part in self.parts.items()}

        def exactly(which: Tensor) -> Tensor:
            only, none = which.new_zeros(1), torch.zeros(1, dtype=torch.float64, device=self.device)
            found = [each.get(i) for i in which.tolist()]
            return torch.cat([none if norms is None else norms.again(only) for norms in found])

        return Norms(
            self._each({i: found.value for i, found in each.items()}),
            self._each({i: found.doubt for i, found in each.items()}),
            lambda: self._each({i: e.sq_error() for i, e in each.items()}),
            rows=any(found.rows for found in each.values()), exact=exactly,
        )  # fmt: skip

    def sq_error(self) -> Tensor | None:
        """Each part's."""
        return self._each({i: part.sq_error() for i, part in self.parts.items()})

    def dot(self, direction: Tensor) -> Tensor:
        """Each part's."""
        return self._each({i: part.dot(direction) for i, part in self.parts.items()})

    def project(self, sketch: Sketch) -> Tensor:
        """Each part's."""
        return self._each({i: p.project(sketch) for i, p in self.parts.items()}, sketch.dim)

    # ------------------------------------------------------------------ sums

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """The parts' sums, added."""
        total = torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        for i, part in self.parts.items():
            total += part.weighted_sum(c[i : i + 1], certain=certain)
        return total


def merge_single_samples(parts: Mapping[int, Form], n: int) -> Form:
    """Forms of single samples as one form of all, where they are alike."""
    like = next(iter(parts.values()))
    kinds = {type(part) for part in parts.values()}
    if 2 * len(parts) < n or len(kinds) > 1 or len({part.dtype for part in parts.values()}) > 1:
        return SingleSamples(parts, n, like)
    if kinds == {Dense}:
        return Dense(SingleSamples(parts, n, like).dense())
    found: Form | None = None
    if kinds == {Outer}:
        found = _positions([(i, p) for i, p in parts.items() if isinstance(p, Outer)], n)
    elif kinds == {Patches} and len(parts) == n:
        found = _images([p for _, p in sorted(parts.items()) if isinstance(p, Patches)])
    return SingleSamples(parts, n, like) if found is None else found


def _positions(parts: list[tuple[int, Outer]], n: int) -> Outer | None:
    """Factors filled up with zeros, unless most of them would be zeros."""
    like, counts = parts[0][1], [part.t for _, part in parts]
    longest = max(counts)
    if n * longest > 2 * sum(counts) or any(p.key() != like.key() for _, p in parts):
        return None
    blocks, a, b = like.key()
    left = like.left.new_zeros(n, blocks, longest, a)
    right = like.right.new_zeros(n, blocks, longest, b)
    for i, part in parts:
        left[i, :, : part.t], right[i, :, : part.t] = part.left[0], part.right[0]
    return Outer(left, right, like.shape)


def _images(parts: list[Patches]) -> Patches | None:
    """One image of each sample, all of one size."""
    like = parts[0]
    sizes = {(p.x.shape, p.grad.shape, p.images, p.geometry) for p in parts}
    if len(sizes) > 1 or like.images != 1:
        return None
    x, grad = (torch.cat(group) for group in ([p.x for p in parts], [p.grad for p in parts]))
    return Patches(x, grad, like.weight, like.geometry)
