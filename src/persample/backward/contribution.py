"""One use's contribution to one operand, and the parameters behind it."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..autograd_graph import expect_unconverted, leaves_of, lookups_of, nodes_of
from ..distributed import is_freed
from ..errors import UsageError, describe
from ..forms import Dense, Form, Joint, Part, Picked, Pullback, Replay, Scaled, SingleSamples
from ..guards.messages import hook_on_expanded
from ..layouts import contiguous_strides
from ..rules import OfTable
from ..rules.embedding import of_table
from ..uses import Firing, Operand, Use, version, versions
from .elementwise_weights import scaled_back

Selected = Mapping[str, Tensor]


@dataclass(slots=True)
class Contribution:
    """One use's contribution to one operand in one backward."""

    use: Use
    operand: Operand
    form: Form
    rule: str
    firing: Firing | None
    watched: Sequence[Tensor] = ()
    versions: Sequence[int] = ()

    def keep(self) -> None:
        """Prepare it to be kept: as small as possible, and watched for writes."""
        form, factors, place = self.form, self.use.kind.factors, self.operand.position
        if form.__class__ is not Dense and place not in factors:
            form = self.form = small(form)
            if form.__class__ is not Dense:
                factors.add(place)
        if form.__class__ is not Dense or self.firing is not None:
            more = () if self.firing is None else held(self.firing)
            self.watched = [*form.tensors(), *more]
            self.versions = versions(self.watched)

    def relies(self, by_hand: Collection[Any]) -> bool:
        """Whether an answer is computed from values of parameters when it is asked for."""
        operand = self.operand
        if not self.form.n:  # zeros, whatever they are
            return False
        if self.firing is not None:
            return True
        if _replays(self.form):
            return True
        if operand.edge is None or operand.lookup is not None:
            return False
        return operand.view is None or bool(by_hand)

    def overwritten(self) -> bool:
        """Whether what is kept was written to."""
        return bool(self.watched) and versions(self.watched) != self.versions


def _replays(form: Form) -> bool:
    """Whether an operator may be run again."""
    if isinstance(form, SingleSamples):
        return any(_replays(part) for part in form.parts.values())
    return isinstance(form, Replay)


def sources(operand: Operand, selected: Selected) -> list[str]:
    """The parameters that a derived tensor was computed from."""
    if operand.name is not None:
        return [operand.name]
    if operand.edge is None:
        return []
    if operand.lookup is not None:
        return [operand.lookup.name]
    if operand.sources is None:
        if all(parameter.is_leaf for parameter in selected.values()):  # a user's hooks stay quiet
            ends = {id(leaf) for leaf in leaves_of(operand.edge.node)}
            operand.sources = [name for name, p in selected.items() if id(p) in ends]
            return operand.sources
        with torch._C.DisableTorchFunction():
            found = torch.autograd.grad(
                operand.edge, list(selected.values()), torch.zeros_like(operand.value),
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
        operand.sources = [n for n, f in zip(selected, found, strict=True) if f is not None]
    return operand.sources


def attached(
    entry: Contribution, names: Container[str], selected: Selected, by_hand: Collection[Any] = ()
) -> list[tuple[str, Form]]:
    """The entry's form as a form of the parameters behind its operand.

    ``by_hand``: nodes of custom functions on weights, and of weights that have hooks.
    """
    operand, form = entry.operand, entry.form
    if operand.name is not None:
        return [(operand.name, form)] if operand.name in names else []
    if by_hand and operand.edge is not None and _passes(operand.edge.node, by_hand):
        expect_unconverted(operand.edge.node, describe(entry.use.place))
        if form.shape != operand.value.shape:
            raise hook_on_expanded(entry.use)
        return [
            (name, Joint([form], [operand.edge], selected[name]))
            for name in sources(operand, selected)
            if name in names
        ]
    if operand.once is not None and form.shape != operand.value.shape:
        once = replace(entry, operand=operand.once, form=_reshaped(form, operand.once.value.shape))
        return attached(once, names, selected, by_hand)
    lookup, view = operand.lookup, operand.view
    if lookup is not None and version(lookup.index) == lookup.version:
        if isinstance(form, Dense):
            return [(lookup.name, of_table(form, lookup))] if lookup.name in names else []
    if view is not None and tuple(form.shape) == view.size:
        if view.name not in names:
            return []
        shape = selected[view.name].shape
        return [(view.name, Part(form, shape, view.strides, view.offset))]
    if operand.edge is not None:
        expect_unconverted(operand.edge.node, describe(entry.use.place))
    return [
        (name, _pulled_back(form, operand, selected[name]))
        for name in sources(operand, selected)
        if name in names
    ]


def _reshaped(form: Form, shape: torch.Size) -> Form:
    """The same numbers with axes of size one left out."""
    if isinstance(form, Dense):
        return Dense(form.values.reshape(form.n, *shape))
    return Part(form, shape, contiguous_strides(form.shape), 0)


def _pulled_back(form: Form, operand: Operand, parameter: Tensor) -> Form:
    """Through the derived tensor's graph, to a table's picked rows or to the whole parameter."""
    edge, dtype = operand.edge, operand.value.dtype
    if operand.lookups is None:
        operand.lookups = lookups_of(edge.node)
    node = operand.lookups.get(id(parameter))
    if node is None or parameter.dim() != 2:
        found = scaled_back(form, edge, parameter)
        return Pullback(form, edge, parameter, dtype) if found is None else found
    try:
        index, padding = node._saved_indices.clone(), node._saved_padding_idx
    except RuntimeError:  # overwritten: autograd says so
        return Pullback(form, edge, parameter, dtype)
    shape = torch.Size((*index.shape, parameter.shape[1]))
    if edge.node is not node or form.shape != shape:
        form = Pullback(form, edge, parameter, dtype, (GradientEdge(node, 0), shape))
    # as torch saves it, no padding is the largest number there is
    padding = padding if 0 <= padding < parameter.shape[0] else -1
    return Picked(form, parameter.shape, index.reshape(-1).to(torch.long), padding, id(node))


def forget_lookups(use: Use, by_hand: Collection[Any]) -> None:
    """Rows of a table that code of the user's own sees are not just rows of the table."""
    for operand in use.operands:
        if operand.lookup is not None or operand.once is not None:
            if _passes(operand.edge.node, by_hand):
                operand.lookup = operand.once = None
                operand.expanded = operand.expanded if operand.view is not None else ()


def _passes(node: Any, by_hand: Collection[Any]) -> bool:
    """Whether the graph from here on to parameters passes one of these nodes."""
    return any(at in by_hand for at in nodes_of(node))


def table_behind(operand: Operand, selected: Selected) -> Operand:
    """The table behind a look-up, as an operand of its own."""
    assert operand.lookup is not None
    return _of_parameter(operand.position, operand.lookup.name, selected)


def _of_parameter(position: int, name: str, selected: Selected) -> Operand:
    value = selected[name].detach()
    return Operand(position, value, name, version(value))


def crosses(edge: Any) -> bool:
    """Whether a derived tensor was passed to a sharded module: its backward would free memory."""
    nodes = () if edge is None else nodes_of(edge.node)
    return any(node.name().startswith("RegisterPostBackwardFunction") for node in nodes)


def written_out(entry: Contribution, selected: Selected) -> list[Contribution] | None:
    """Sharded parameters lose their memory after backward: compute what needs it at once.

    None where the memory is gone already.
    """
    needed = sources(entry.operand, selected)
    if any(is_freed(selected[name]) for name in needed):
        return None
    if isinstance(entry.form, Replay):
        entry.form = Dense(entry.form.wide_dense())
    found = []
    for name, form in attached(entry, set(needed), selected):
        if entry.operand.view is None and isinstance(form, (Part, Picked, Pullback, Scaled)):
            form = Dense(form.wide_dense())
        operand = _of_parameter(entry.operand.position, name, selected)
        found.append(Contribution(entry.use, operand, form, entry.rule, entry.firing))
    return found


def held(firing: Firing) -> list[Tensor]:
    """What a kept firing holds."""
    return [*firing.saved, *(g for g in firing.grads if g is not None)]


def small(form: Form) -> Form:
    """Keep rows instead of factors where they are smaller."""
    if form.n * form.row_bytes() > form.nbytes() or isinstance(form, (Dense, Replay)):
        return form
    return Dense(form.wide_dense())


def reached(rows: Tensor | None, grad: Tensor) -> bool:
    """Whether these rows (of no sample, or of one that was guessed) received a gradient."""
    return rows is not None and bool(rows.any()) and bool((grad * rows).ne(0).any())


def expect_fitting(use: Use, forms: Any, n: int) -> None:
    """Refuse what a user's own rule returns if it is not one form for each operand."""
    fits = isinstance(forms, (list, tuple)) and len(forms) == len(use.operands)
    for operand, form in zip(use.operands, forms, strict=True) if fits else ():
        rows = form.rows if isinstance(form, OfTable) else form
        if rows is None:
            continue
        shape = operand.value.shape
        free = [1 if d in operand.expanded else size for d, size in enumerate(shape)]
        fits = fits and isinstance(rows, Form) and rows.n == n
        fits = fits and (isinstance(form, OfTable) or [*rows.shape] in ([*shape], free))
    if not fits:
        raise UsageError(
            f"the rule given for {use.operator} does not fit its call",
            where=describe(use.place),
            why=f"it must return a form of {n} gradients, or None, for each of "
            f"{[tuple(operand.value.shape) for operand in use.operands]}",
            fix="raise persample.rules.Unsuited where the generic rule shall serve the call",
        )
