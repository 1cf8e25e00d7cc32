"""Uses in which a parameter met the data of one sample alone: ``layer(x[i])`` in a loop."""

from __future__ import annotations

import dataclasses

import torch

from .entries import small
from .forms import Apart, Form, Rows
from .layout import Layout
from .rules import OfTable
from .use import Use


def the_only(use: Use) -> int | None:
    """The sample that all data and results of a use belong to as a whole."""
    found: set[int] = set()
    for layout in (*use.out_layouts, *use.kind.layouts):
        if layout is None:
            continue
        if layout.ids is None or layout.ids.numel() != 1:
            return None
        found.add(int(layout.ids))
    return found.pop() if len(found) == 1 and min(found) >= 0 else None


def of_one(use: Use) -> Use:
    """The same use, as if its sample were the only one."""
    kind = dataclasses.replace(use.kind, layouts=[_first(a) for a in use.kind.layouts])
    same = dataclasses.replace(use, kind=kind)
    layouts = [Layout(0, 1, torch.zeros_like(a.ids)) for a in use.out_layouts if a.ids is not None]
    same.tapped = dataclasses.replace(use.tapped, layouts=layouts)
    return same


def _first(layout: Layout | None) -> Layout | None:
    if layout is None or layout.ids is None:
        return None
    return Layout(0, 1, torch.zeros_like(layout.ids))


def placed(form: Form | OfTable | None, sample: int, n: int) -> Form | OfTable | None:
    """The form of one sample among n."""
    if form is None:
        return None
    if isinstance(form, OfTable):
        return OfTable(_rows(form.rows, sample, n))
    if isinstance(form, Rows):
        return _rows(form, sample, n)
    return Apart({sample: small(form)}, n, form)


def _rows(form: Rows, sample: int, n: int) -> Rows:
    return Rows(torch.full_like(form.index, sample), form.index, form.values, n, form.shape)
