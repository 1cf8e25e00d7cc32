"""Per-sample gradients written out while the backward pass runs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..forms import Form, Joint, total, wide


class Written:
    """Rows of every parameter, written out as soon as a use fires; factors are let go."""

    def __init__(self, selected: Mapping[str, Tensor]) -> None:
        self.selected = selected
        self.rows: dict[str, Tensor] = {}
        self.waiting: dict[str, list[Form]] = {}

    def __call__(self, name: str, form: Form) -> None:
        """Add a use's rows; where code of the user's own follows, all uses wait for each other."""
        if isinstance(form, Joint):
            self.waiting.setdefault(name, []).append(form)
        else:
            self._add(name, form)

    def settle(self) -> None:
        """The backward pass is over."""
        for name, forms in self.waiting.items():
            self._add(name, total(forms))
        self.waiting.clear()

    def _add(self, name: str, form: Form) -> None:
        known = self.rows.get(name)
        if known is None:
            self.rows[name] = form.fresh()
        elif known.dtype == wide(form.dtype):
            form.add_to(known)
        else:
            self.rows[name] = known.to(wide(form.dtype)) + form.wide_dense()

    def finished(self, name: str) -> Tensor:
        """The rows in the parameter's dtype."""
        rows, dtype = self.rows[name], self.selected[name].dtype
        return rows if rows.dtype is dtype else rows.to(dtype)
