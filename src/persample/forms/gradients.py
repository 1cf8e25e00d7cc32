"""Questions to all parameters at once: their uses are merged, asked together, and remembered.

Their norms share products, and what rounding leaves in doubt is read back once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from .cost import LIMIT, scratch
from .fast.stacked import Joined, stack_forms
from .fast.written_rows import Kept, kept_rows, pull_back_together
from .form import Form
from .merging import total
from .outer import Outer
from .position_products import share_products
from .rounding import Norms
from .total import Pieces

Names = Sequence[Sequence[str]]  # groups of parameters
Uses = Mapping[str, list[Form]]
_DOUBT = {torch.float32: 8e-3, torch.float64: 4e-9}  # of a square; more is computed again
_OFF = 3e-2  # the same of rows that are rounded: they take longer
_WIDTH = attrgetter("itemsize")
_NOTHING = 1e10  # squares of so many times the least number are none


class Gradients:
    """One form for every parameter that received a gradient, made of all its uses.

    Questions bring the ``uses`` of parameters that are not ``known`` yet.
    """

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: dict[str, Form] = {}

    def forms(self, names: Iterable[str], uses: Uses) -> dict[str, Form]:
        """Those of some parameters."""
        known = self.known
        for name, found in uses.items():
            known[name] = total(found)
        return {name: known[name] for name in names if name in known}

    def written(self, names: Iterable[str], uses: Uses) -> dict[str, Form]:
        """The same where rows will be looked at: what is behind derived tensors is written out."""
        forms = self.forms(names, uses)
        found = pull_back_together(forms)
        self.known.update(found)
        return forms | found

    def sq_norms(
        self, groups: Names, uses: Uses, joined: dict[str, Form], n: int, device: torch.device
    ) -> Tensor:
        """‖gᵢ‖² over groups of parameters: (groups, n). What is ``joined`` needs one group."""
        forms = self._stacked(groups, uses, joined, sums=False)
        return add_norms(_in_groups(forms, groups), n, device)

    def _stacked(
        self, groups: Names, uses: Uses, joined: dict[str, Form], *, sums: bool
    ) -> dict[str, Form]:
        """Forms to take squares of, and perhaps ``sums``: small ones of one group are joined."""
        forms = self.written([name for group in groups for name in group], uses)
        return stack_forms(forms, sums=sums) | joined if len(groups) == 1 else forms

    def weighted_sums(
        self, names: Iterable[str], uses: Uses, joined: dict[str, Form], c: Tensor
    ) -> dict[str, Tensor]:
        """Σ cᵢ gᵢ of every parameter."""
        found: dict[str, Tensor] = {}
        for name, form in (stack_forms(self.forms(names, uses), squares=False) | joined).items():
            found |= form.sums(c) if isinstance(form, Joined) else {name: form.weighted_sum(c)}
        return found

    def bounds(
        self, groups: Names, uses: Uses, joined: dict[str, Form], room: Callable[[int], int],
        *, counted: bool, n: int, device: torch.device, elements: int,
    ) -> tuple[dict[str, Form], Tensor]:  # fmt: skip
        """Forms for one sum, and what ‖gᵢ‖² of groups does not exceed in it: (groups, n).

        Rows are kept where that is cheaper, in the room for so many bytes; ``counted`` ones are
        part of the question's memory.
        """
        forms = self._stacked(groups, uses, joined, sums=True)
        rows = kept_rows(forms, room)
        if counted and rows:
            LIMIT.set(scratch() - sum(form.nbytes() for form in rows.values()))
        forms |= rows
        return forms, bound_norms(_in_groups(forms, groups), n, device, elements)


def _in_groups(forms: Mapping[str, Form], groups: Names) -> list[list[Norms]]:
    """Norms of groups of parameters; what is joined is under the first one's name."""
    found = norms_of(forms.values())
    if len(groups) == 1:
        return [[norms for parts in found for norms in parts]]
    named = dict(zip(forms, found, strict=True))
    return [[norms for name in group for norms in named.get(name, ())] for group in groups]


def certain_sums(
    forms: Mapping[str, Form], c: Mapping[str, Tensor], bad: Tensor | None
) -> dict[str, Tensor]:
    """Σ cᵢ gᵢ of every parameter from what bounds were computed from, without ``bad`` samples.

    They are removed before any batched kernel: 0 · NaN is NaN. Kept rows come first: each sum of
    them frees more than it takes.
    """
    found: dict[str, Tensor] = {}
    for name in sorted(forms, key=lambda name: not isinstance(forms[name], Kept)):
        form = forms[name] if bad is None else forms[name].without(bad)
        if isinstance(form, Joined):
            found |= form.sums(c[name])
        else:
            found[name] = form.weighted_sum(c[name], certain=True)
    return found


def norms_of(forms: Iterable[Form]) -> list[list[Norms]]:
    """Of every form, and of its pieces on their own."""
    listed = list(forms)
    outer = [form for form in listed if isinstance(form, Outer) and form.t > 1]
    if len(outer) < 2:
        return [_of_pieces(form) for form in listed]
    with share_products(factor for form in outer for factor in form.given):
        return [_of_pieces(form) for form in listed]


def _of_pieces(form: Form) -> list[Norms]:
    return [part.norms() for part in (form.parts if isinstance(form, Pieces) else (form,))]


Groups = Sequence[Sequence[Norms]]


def add_norms(groups: Groups, n: int, device: torch.device) -> Tensor:
    """‖gᵢ‖² over the norms of each group, of gradients side by side: (groups, n)."""
    return _settled(_Listed(groups, n, device), sure=False)[1]


def bound_norms(groups: Groups, n: int, device: torch.device, elements: int) -> Tensor:
    """What ‖gᵢ‖² of each group, of so many elements at most, certainly does not exceed.

    Small numbers may be swallowed by a large one, and squares may be too small for their dtype.
    """
    listed, value = _settled(_Listed(groups, n, device), sure=True)
    parts, numbers = listed.parts, torch.finfo(listed.narrow)
    eps, tiny = numbers.eps, numbers.tiny
    more = (len(parts) + 8) * eps
    if any(part.doubt is not None for part in parts):
        value = value + listed.add([part.doubt for part in parts])
    value = value * (1 + more + max([part.units for part in parts], default=0) * eps)
    value += elements * tiny
    sq_errors = [part.sq_error() for part in parts]
    if any(sq_error is not None for sq_error in sq_errors):
        each = zip(parts, sq_errors, strict=True)
        twice = [4 * off if part.rows and off is not None else off for part, off in each]
        off = (listed.add(twice) + len(parts) * tiny).sqrt_()
        value = value.sqrt_().add_(off, alpha=1 + more).square_()
    return value


def settled(form: Form) -> list[Norms]:
    """The norms of one form and its pieces, nothing of which will be computed again."""
    listed, _ = _settled(_Listed(norms_of([form]), form.n, form.device), sure=True)
    return [part._replace(exact=None) for part in listed.parts]


class _Listed:
    """Norms in a row, each with the number of its group."""

    def __init__(self, groups: Groups, n: int, device: torch.device) -> None:
        self.parts: list[Norms] = []
        self.group: list[int] = []
        for k, group in enumerate(groups):
            self.parts += group
            self.group += [k] * len(group)
        dtypes = {part.value.dtype for part in self.parts} or {torch.float32}
        self.narrow = min(dtypes, key=_WIDTH)
        self._as, self._shape = (device, max(dtypes, key=_WIDTH)), (len(groups), n)

    def add(self, each: Sequence[Tensor | None]) -> Tensor:
        """The sums over groups of a number for every part, or none: (groups, n), to be read."""
        rows = [numbers.to(*self._as) for numbers in each if numbers is not None]
        if self._shape[0] == len(rows) == 1:
            return rows[0].unsqueeze(0)
        if self._shape[0] == 1 and rows:
            return torch.stack(rows).sum(0, keepdim=True)
        groups = [k for k, numbers in zip(self.group, each, strict=True) if numbers is not None]
        if groups == [*range(self._shape[0])]:  # one in each
            return torch.stack(rows)
        device, dtype = self._as
        zeros = torch.zeros(self._shape, dtype=dtype, device=device)
        if not rows:
            return zeros
        return zeros.index_add_(0, torch.tensor(groups, device=device), torch.stack(rows))

    def gap(self, part: Norms, *, sure: bool) -> Tensor | None:
        """What an exact value would take out of doubt, and a share of what its rows are off by."""
        if part.exact is None:
            return None
        sq_error = part.sq_error() if sure and part.rows else None
        if sq_error is None:
            return part.doubt
        off = sq_error.sqrt()
        found = (2 * part.value.sqrt() + off).mul_(off).mul_(_DOUBT[self.narrow] / _OFF)
        return found if part.doubt is None else found.add_(part.doubt)


def _settled(listed: _Listed, *, sure: bool) -> tuple[_Listed, Tensor]:
    """Norms and their sums; where so much is in doubt that it matters, they are computed again.

    ``sure``: what rows are off by counts, too. All doubts are read back at once.
    """
    parts = listed.parts
    if sure:
        parts[:] = [part.kept() for part in parts]
    value = listed.add([part.value for part in parts])
    exact = [part for part in parts if part.exact is not None]
    gaps = [listed.gap(part, sure=sure) for part in parts] if exact else []
    count = sum([gap is not None for gap in gaps])
    if not count:
        return listed, value
    least = _NOTHING * torch.finfo(listed.narrow).tiny
    limit = (value * _DOUBT[listed.narrow]).clamp_(min=least)
    doubtful = listed.add(gaps) > limit
    if not any(doubtful.any(1).tolist()):
        return listed, value
    for k, (part, gap) in enumerate(zip(parts, gaps, strict=True)):
        if gap is not None:
            at, share = listed.group[k], limit[listed.group[k]] / (2 * count)
            which = (doubtful[at] & (gap.to(share) > share)).nonzero().flatten()
            if which.numel():
                parts[k] = part.recomputed(which.to(gap.device))
    return listed, listed.add([p.value for p in parts])
