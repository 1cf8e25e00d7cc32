"""Rows that are written out once, for all that is asked of them.

Learned queries that pass through layers before they are used with data have many parameters behind
them. Going back to each on its own would walk the same graph again and again. Rows of a table that
constants picked again and again are added up.

A clipped sum takes norms first and a sum afterwards. Where positions are many, the rows themselves
serve both for less than products of positions and a second matrix product; and what is computed by
backward passes is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ..cost import scratch, spans
from ..dense import Dense
from ..form import Form, wide
from ..merging import total
from ..outer import Outer
from ..pullback import Joint, Pullback, Replay, walk_rows
from ..total import Total
from .elementwise import Scaled
from .picked_rows import Picked

_BEHIND = (Picked, Pullback, Total)
_KEPT = 7  # multiplications worth a byte of rows: level in time, where rows are not in cache


def pull_back_together(forms: Mapping[str, Form]) -> dict[str, Form]:
    """New forms for the parameters behind derived tensors: what is needed twice is computed once.

    Rows take half of the budget at most.
    """
    if not any(issubclass(kind, _BEHIND) for kind in {form.__class__ for form in forms.values()}):
        return {}
    found = _walk_shared_graphs(forms)
    room = scratch() // 2 - sum(form.nbytes() for form in found.values())
    for name, form in forms.items():
        if isinstance(form, Picked) and not form.distinct and form.n:
            rows = min(form.index.numel(), form.shape[0])
            size = form.n * rows * form.shape[1] * wide(form.dtype).itemsize
            if size <= room:
                room -= size
                found[name] = form.gather()
    return found


def _walk_shared_graphs(forms: Mapping[str, Form]) -> dict[str, Form]:
    """New forms for parameters of which several share a graph."""
    behind: dict[str, list[Pullback]] = {}
    for name, form in forms.items():
        if isinstance(form, (Pullback, Total)):
            mine = [part for part in _parts(form) if isinstance(part, Pullback)]
            if mine:
                behind[name] = mine
    maps = {part.map(): part for mine in behind.values() for part in mine}
    count = sum(len(mine) for mine in behind.values())
    if count < 2 or any(part.derived != wide(part.derived) for part in maps.values()):
        return {}  # something has to be scaled on the way
    if count == len(maps) and any(part.derived.is_complex for part in maps.values()):
        return {}  # nothing is shared, and rows are twice as large
    parameters = {name: mine[0].parameter for name, mine in behind.items()}
    n = next(iter(maps.values())).n
    if n == 0 or n * _bytes_of_all(parameters) > scratch() // 2:
        return {}
    rows = _rows(list(maps.values()), parameters, n)
    found = {}
    for name, values in rows.items():
        others = [part for part in _parts(forms[name]) if not isinstance(part, Pullback)]
        found[name] = total([*others, Dense(values)])
    return found


def _parts(form: Form) -> list[Form]:
    return form.forms if isinstance(form, Total) else [form]


def _bytes_of_all(parameters: Mapping[str, Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters.values())


def _rows(maps: list[Pullback], parameters: Mapping[str, Tensor], n: int) -> dict[str, Tensor]:
    """Every parameter's rows, a few samples at a time."""
    each = sum(part.form.row_bytes() for part in maps) + _bytes_of_all(parameters)
    edges, found = [part.edge for part in maps], {}
    for first, last in spans(n, each, scratch() // 2):
        seeds = [part.form.dense(first, last).to(part.derived) for part in maps]
        grads = walk_rows(edges, list(parameters.values()), seeds)
        for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
            if grad is not None and last - first == n:
                found[name] = grad
            elif grad is not None or name not in found:
                found.setdefault(name, parameter.new_zeros(n, *parameter.shape).detach())
                if grad is not None:
                    found[name][first:last] = grad
    return found


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
    return form.plan().cost - _KEPT * _bytes_of_rows(form)


def _bytes_of_rows(form: Form) -> int:
    return form.n * form.size * wide(form.dtype).itemsize


def kept_rows(forms: Mapping[str, Form], room: Callable[[int], int]) -> dict[str, Kept]:
    """Rows of the forms that save most for their size, in the room for so many bytes."""
    found: dict[str, Kept] = {}
    gains = {name: saved for name, form in forms.items() if (saved := work_saved(form)) > 0}
    if not gains:
        return found
    sizes = {name: _bytes_of_rows(forms[name]) for name in gains}
    left = room(sum(sizes.values()))
    for name in sorted(gains, key=lambda name: gains[name] / max(1, sizes[name]), reverse=True):
        if sizes[name] <= left:
            left -= sizes[name]
            found[name] = Kept(forms[name].wide_dense())
    return found
