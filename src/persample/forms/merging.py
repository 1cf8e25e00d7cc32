"""One form for one parameter: uses of equal kinds are merged before they are added."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from .cost import scratch
from .dense import Dense
from .fast.disjoint_parts import Pieces, disjoint
from .fast.picked_rows import Picked
from .fast.single_samples import SingleSamples, merge_single_samples
from .form import Form, add_all, wide
from .mapped import Mapped
from .outer import Outer
from .strided_part import Part
from .table_rows import Rows, concatenated_rows
from .total import Total
from .user_maps import Joint, join_uses


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
    for form in _unfold(forms):
        if isinstance(form, SingleSamples):
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
        merged.append(group[0] if len(group) == 1 else _concatenate(group))
    tables = tables + _as_tables(mapped, known=bool(tables))
    if tables:
        merged.append(tables[0] if len(tables) == 1 else concatenated_rows(tables))
    if dense:
        merged.append(dense[0] if len(dense) == 1 else _add_dense(dense))
    for alike in mapped.values():
        sums = alike[0].of(total([f.form for f in alike])) if len(alike) > 1 else alike[0]
        merged.append(sums)
    if joint:
        merged.append(join_uses(joint))
    if apart:
        own = {i: total(parts) for i, parts in sorted(apart.items())}
        merged.append(merge_single_samples(own, forms[0].n))
    merged = _join_disjoint(merged)
    return merged[0] if len(merged) == 1 else Total(merged)


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


def _as_tables(mapped: dict[Hashable, list[Mapped]], *, known: bool) -> list[Rows]:
    """Picked rows written out, where others of the same table are known and the budget allows.

    Without it, rows of the whole table would have to be written out, two at least.
    """
    picked = {key: alike for key, alike in mapped.items() if isinstance(alike[0], Picked)}
    each = [f for alike in picked.values() for f in alike]
    size = sum(2 * f.n * f.form.size * wide(f.dtype).itemsize for f in each)
    if len(picked) + known < 2:
        return []
    if size > max(scratch(), 2 * each[0].size * wide(each[0].dtype).itemsize):
        return []
    groups = [mapped.pop(key) for key in picked]
    return [f.table() for alike in groups for f in alike if isinstance(f, Picked)]


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
