"""Per-sample gradients written out while the backward pass runs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..backward.consumers.consumer import Consumer, Parts
from ..backward.contribution import Contribution
from ..forms import Form, Joint, Patches, total, wide, within

_PARTS = 2  # parts in which the samples' rows of a conv3d are written out


class Written(Consumer):
    """Rows of every parameter, written out as soon as a use fires; factors are freed."""

    def __init__(self, selected: Mapping[str, Tensor]) -> None:
        self.selected = selected
        self.rows: dict[str, Tensor] = {}
        self.waiting: dict[str, list[Form]] = {}

    def take(self, contribution: Contribution, parts: Parts) -> None:
        """Add a use's rows; where code of the user's own follows, all uses wait for each other."""
        own = contribution.operand.name
        if own is not None and own in self.selected:  # nothing between the use and its parameter
            self._add(own, contribution.form)
            return
        for name, form in parts(contribution):
            if isinstance(form, Joint):
                self.waiting.setdefault(name, []).append(form)
            else:
                self._add(name, form)

    def finish(self) -> None:
        """The backward pass is over."""
        for name, forms in self.waiting.items():
            self._add(name, total(forms))
        self.waiting.clear()

    def rollback(self) -> None:
        """The pass failed: nothing of it is used."""
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.rows.clear()
        self.waiting.clear()

    def _add(self, name: str, form: Form) -> None:
        known = self.rows.get(name)
        if known is None:
            self.rows[name] = _fresh(form)
        elif known.dtype == wide(form.dtype):
            form.add_to(known)
        else:
            self.rows[name] = known.to(wide(form.dtype)) + form.wide_dense()


def _fresh(form: Form) -> Tensor:
    """Rows in memory of their own; those of conv3d for some samples at a time.

    Kernels for volumes copy input and output gradient into an order of their own (oneDNN), while
    both and the input's gradient are held.
    """
    if not isinstance(form, Patches) or len(form.shape) < 5:
        return form.hand_over()
    rows = form.grad.new_empty((form.n, *form.shape), dtype=wide(form.dtype))
    with within(form.n * form.row_bytes() // _PARTS):
        return form.write(rows)
