"""Rows that are written out once, for questions that look at every gradient twice.

A clipped sum takes norms first and a sum afterwards. Where positions are many, the rows themselves
serve both for less than products of positions and a second matrix product; and what is computed by
backward passes is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ..dense import Dense
from ..form import Form, wide
from ..outer import Outer
from ..pullback import Pullback
from ..replay import Replay
from ..total import Total
from ..user_maps import Joint
from .elementwise import Scaled

_KEPT = 7  # multiplications worth a byte of rows: level in time, where rows are not in cache


class Kept(Dense):
    """Rows for norms and one sum, which frees them."""

    __slots__ = ()

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """The only use of the rows besides norms."""
        total = super().weighted_sum(c)
        self.values = self.values.new_empty(0, *self.shape)
        return total


def work_saved(form: Form) -> int:
    """Multiplications that kept rows save: norms cost nothing beyond writing and reading them.

    What goes back through a graph, or runs an operator again, would do so for norms and for sums.
    """
    if form.__class__ is Dense:
        return 0
    if isinstance(form, (Joint, Pullback, Replay)):
        return form.plan().cost
    if type(form) is Total and form.tied() is None:  # norms are those of rows
        return form.work()
    factors = form.form if isinstance(form, Scaled) else form
    if not isinstance(factors, Outer) or form.dtype.is_complex or factors.t == 1:
        return 0
    return form.plan().cost - _KEPT * _bytes(form)


def _bytes(form: Form) -> int:
    return form.n * form.size * wide(form.dtype).itemsize


def kept_rows(forms: Mapping[str, Form], room: Callable[[int], int]) -> dict[str, Kept]:
    """Rows of the forms that save most for their size, in the room for so many bytes."""
    found: dict[str, Kept] = {}
    gains = {name: work_saved(form) / max(1, _bytes(form)) for name, form in forms.items()}
    worth = [n for n in sorted(gains, key=gains.__getitem__, reverse=True) if gains[n] > 0]
    left = room(sum(_bytes(forms[name]) for name in worth)) if worth else 0
    for name in worth:
        form = forms[name]
        if _bytes(form) <= left:
            left -= _bytes(form)
            found[name] = Kept(form.wide_dense())
    return found
