"""Whose rows are that no sample wrote: padding, tokens, places of samples without rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import Layout, Shape, by_position, ids_of


def assign_owners(
    states: Any, n: int, patterns: Sequence[Tensor], shape: Shape, *, more_to_come: bool
) -> tuple[Any, Tensor | None]:
    """Assign unowned rows to samples where a parameter is used with them; and which were guessed.

    They belong to the sample that the user's ids (``patterns``) say, or whose rows they were
    joined to (padding, a token), or whose position it is. Constants may be coloured freely, but a
    sum of losses, or losses in another order, would count a wrong guess for the wrong sample:
    gradients of guessed rows are taken only if losses are in the samples' order, so that each row
    is the gradient of the loss in its place. Rows stay unowned where there is ``more_to_come``, and
    where they may be told apart by the user's ids as well as one for each sample.
    """
    ids = states.ids if states.__class__ is Layout else None
    if ids is None or states.owned:
        return states, None
    unowned = ids < 0
    all_unowned = bool(unowned.all())
    if all_unowned:
        found = None if more_to_come else _owners_of_unowned(ids, n, patterns, shape)
    else:
        found = _owners_by_user_ids(ids, patterns)
    if found is not None and _fits_positions(found, ids, n):
        return states, None
    if found is None and not (all_unowned or more_to_come):
        found = _guess_owners(ids, n)
    if found is None:
        return states, None
    return Layout(0, 1, found, states.coupled), unowned


def _owners_of_unowned(
    ids: Tensor, n: int, patterns: Sequence[Tensor], shape: Shape
) -> Tensor | None:
    """Where every row is unowned: as the user numbers rows, or one for each sample."""
    rows = shape[0] if shape else 0
    orders = patterns or [torch.arange(n, device=ids.device)]
    for order in orders:
        if rows == order.numel() > 0:
            return order.to(ids.device).view(-1, *[1] * (len(shape) - 1))
    return None


def _owners_by_user_ids(ids: Tensor, patterns: Sequence[Tensor]) -> Tensor | None:
    """The user's own ids, where rows have these ids or are unowned."""
    if sum(size > 1 for size in ids.shape) == 1:
        rows = ids.flatten()
        for pattern in patterns:
            if pattern.shape == rows.shape and bool(((rows == pattern) | (rows < 0)).all()):
                return pattern.view_as(ids)
    return None


def _fits_positions(found: Tensor, ids: Tensor, n: int) -> bool:
    """Whether rows to which the user's ids fit may as well be one for each sample, in order.

    There are as many rows as samples, by chance or because there is one for each.
    """
    if found.numel() != n:
        return False
    positions = torch.arange(n, device=ids.device).view_as(found)
    if torch.equal(found.to(ids.device), positions):
        return False
    return bool(((ids == positions) | (ids < 0)).all())


def _guess_owners(ids: Tensor, n: int) -> Tensor | None:
    """By what rows were joined to: hints, the only sample there is, or the position."""
    ids = torch.where(ids < -1, -2 - ids, ids)
    known = ids[ids >= 0]
    if known.numel() == ids.numel():
        return ids
    if bool((known == known[0]).all()):
        return known[:1].reshape((1,) * ids.dim())
    guess = by_position(ids, n)
    return None if guess is None else ids_of(guess, ids.shape, n, ids.device)


def in_order(layout: Layout, shape: Shape, n: int, patterns: Sequence[Tensor]) -> bool:
    """Whether losses on axis 0 are one for each sample, in order, or are in that of the ids."""
    if n == 1 or not shape or layout.axes not in ((0,), ()):
        return n == 1
    if layout.ids is None and not patterns:
        return shape[0] == n and layout.inner == 1
    device = torch.device("cpu") if layout.ids is None else layout.ids.device
    rows = ids_of(layout, shape, n, device).flatten().expand(shape[0])
    orders = [torch.arange(n), *patterns]
    return any(
        rows.shape == order.shape and bool(((rows == order.to(device)) | (rows < 0)).all())
        for order in orders
    )
