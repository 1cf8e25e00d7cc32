"""One form for one parameter: uses of equal kinds are merged before they are added."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from .cost import scratch
from .dense import Dense
from .fast.picked_rows import Picked
from .fast.single_samples import SingleSamples, merge_single_samples
from .form import Form, add_all, wide
from .mapped import Mapped, Part
from .outer import Outer
from .pullback import Joint, join_uses
from .table_rows import Rows, concatenated_rows
from .total import Pieces, Total, disjoint

Groups = dict[tuple[Any, Hashable], list[Form]]  # forms that can be merged


def total(forms: list[Form]) -> Form:
    """One form for one parameter: equal kinds are merged first."""
    if len(forms) == 1:
        return forms[0]
    groups: Groups = {}
    for form in _unfold(forms):
        groups.setdefault(_kind(form), []).append(form)
    _write_tables(groups)
    merged = _join_disjoint(
        [
            alike[0] if len(alike) == 1 else _KINDS[kind][1](alike)
            for (kind, _), alike in groups.items()
        ]
    )
    return merged[0] if len(merged) == 1 else Total(merged)


def _kind(form: Form) -> tuple[Any, Hashable]:
    """Which of the kinds that can be merged a form is, and what forms must share to be merged."""
    for kind, (key, _) in _KINDS.items():
        if isinstance(form, kind):
            return kind, key(form)
    return None, id(form)


def _add_dense(dense: list[Dense]) -> Dense:
    """Rows of several uses, in float32 at least."""
    return Dense(add_all([d.values.to(wide(d.dtype)) for d in dense]))


def _unfold(forms: list[Form]) -> Iterator[Form]:
    """Pieces one by one: those of several uses may be of the same places."""
    for form in forms:
        if isinstance(form, Pieces):
            yield from form.parts
        else:
            yield _swap_factors(form)


def _swap_factors(form: Form) -> Form:
    """Products of a transposed matrix as those of the matrix: factors in the other order.

    An autoencoder that uses its weight both ways has two uses of one kind then.
    """
    if not isinstance(form, Part) or not isinstance(form.form, Outer) or form.offset:
        return form
    whole = torch.empty(form.shape, device="meta")
    if whole.dim() < 2 or whole.mT.shape != form.view or whole.mT.stride() != form.strides:
        return form
    left, right = form.form.given
    if (left.shape[-1], right.shape[-1]) != tuple(form.view[-2:]):
        return form  # their lengths are those of other axes
    return Transposed(right, left, form.shape)


class Transposed(Outer):
    """Products of a matrix's transpose: inputs are on the side of others' output gradients."""

    __slots__ = ()


def _balance(form: Outer) -> Outer:
    """The same products from factors of about one size, sample by sample.

    Output gradients are small and inputs large. Side by side, what rounding may hide in the large
    ones' products would seem to matter. Powers of two change no digit.
    """
    left, right = form.given
    if form.dtype != wide(form.dtype) or form.dtype.is_complex:
        return form
    sizes = [torch.linalg.vector_norm(f.flatten(1), dim=1) for f in (left, right)]
    power = ((sizes[1].log2() - sizes[0].log2()) / 2).round().nan_to_num(0, 0, 0).clamp(-30, 30)
    up = power.exp2().view(-1, *[1] * (left.dim() - 1))
    return Outer(left * up, right / up, form.shape)


def _write_tables(groups: Groups) -> None:
    """Write picked rows out, where others of the same table are known and the budget allows.

    Without it, rows of the whole table would have to be written out, two at least.
    """
    picked = {key: alike for key, alike in groups.items() if isinstance(alike[0], Picked)}
    each = [f for alike in picked.values() for f in alike if isinstance(f, Picked)]
    size = sum(2 * f.n * f.form.size * wide(f.dtype).itemsize for f in each)
    if len(picked) + (_TABLES in groups) < 2:
        return
    if size <= max(scratch(), 2 * each[0].size * wide(each[0].dtype).itemsize):
        for key in picked:
            del groups[key]
        groups.setdefault(_TABLES, []).extend(f.table() for f in each)


def _join_disjoint(forms: list[Form]) -> list[Form]:
    """Pieces that do not overlap as one form."""
    parts = [f for f in forms if isinstance(f, Part)]
    if len(parts) < 2 or not disjoint(parts):
        return forms
    return [*(f for f in forms if not isinstance(f, Part)), Pieces(parts)]


def _concatenate(forms: list[Outer]) -> Outer:
    """Several uses of one tensor are more positions of one form."""
    if 0 < sum(isinstance(f, Transposed) for f in forms) < len(forms):
        forms = [_balance(f) for f in forms]
    return Outer(
        torch.cat([f.left for f in forms], 2),
        torch.cat([f.right for f in forms], 2),
        forms[0].shape,
    )


def _map_once(forms: list[Mapped]) -> Form:
    """Forms with the same map: the map of their sum."""
    return forms[0].of(total([f.form for f in forms]))


def _join_samples(forms: list[SingleSamples]) -> Form:
    """Each sample's own forms, added."""
    parts: dict[int, list[Form]] = {}
    for form in forms:
        for i, part in form.parts.items():
            parts.setdefault(i, []).append(part)
    own = {i: total(each) for i, each in sorted(parts.items())}
    return merge_single_samples(own, forms[0].n)


# what forms of a kind must share to be merged, and how they are
_KINDS: dict[Any, tuple[Callable[[Any], Hashable], Callable[[list[Any]], Form]]] = {
    Outer: (lambda form: form.key(), _concatenate),
    Rows: (lambda form: None, concatenated_rows),
    Dense: (lambda form: None, _add_dense),
    Joint: (lambda form: None, join_uses),
    SingleSamples: (lambda form: None, _join_samples),
    Mapped: (lambda form: form.map(), _map_once),
}
_TABLES = (Rows, None)
