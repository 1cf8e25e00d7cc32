"""What each position of a sample contributes: tokens of a language model, pixels of an image.

The elements of a use's result may be split at will: gᵢ = Σₜ gᵢₜ, where gᵢₜ is the gradient that
enters through sample i's elements at position t, every other output gradient set to zero. Position
t has ⟨gᵢₜ, gᵢ⟩ of the squared norm and ⟨gᵢₜ, V⟩ of a dot: both add up exactly, whatever cancels.

So (i, t) is a finer sample. The rules, run again on what was kept with a finer layout, give forms
of n · T gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..backward.collector import Collector
from ..backward.contribution import Contribution, table_behind
from ..backward.rule_choice import forms_of
from ..errors import UsageError, describe
from ..forms import Dense, Form, Joint, Patches, Pixels, Rows, shares, total, wide
from ..layouts import CUSTOM, Layout
from ..rules import OfTable
from ..rules.contraction import parameter_axes
from ..uses import Context, Firing, Use

_CHANNELS = frozenset(
    """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d group_norm
    instance_norm batch_norm prelu""".split()
)
_PRODUCTS = frozenset(
    """matmul mm bmm mv linalg_matmul rmatmul addmm baddbmm addmv einsum""".split()
)


class Placeless(Exception):
    """A use has no axis of positions; the message says why."""


@dataclass(frozen=True, slots=True)
class Split:
    """Where the positions of a result are: ``count`` of them, (i, t) has the id i · count + t.

    ``axes`` are the axes of the positions, empty where they share the samples' axis.
    """

    count: int
    ids: Tensor
    samples: int
    axes: tuple[int, ...]


def split(shape: Sequence[int], layout: Layout, n: int, features: set[int], pixels: bool) -> Split:
    """The rest of the samples' axis, else all pixels, else the first axis that is no feature."""
    axis, shared = (0, shape[0] if pixels else 1) if n == 1 else _samples_axis(shape, layout, n)
    if axis in features and n > 1:
        raise Placeless("the samples share an axis with the parameter")
    others = [d for d in range(len(shape)) if d not in features and (d != axis or n == 1)]
    if n == 1:  # every axis is the one sample's
        others = [d for d in others if shape[d] > 1] or others[-1:]
    if shared > 1:
        axes: tuple[int, ...] = ()
        count, rest, index = shared, [d for d in others if d != axis], torch.arange(shape[axis])
        within = n == 1 or layout.inner > 1  # positions are within samples, or around them
        ids = index if within else index % n * count + index // n
        ids = ids.view([-1 if d == axis else 1 for d in range(len(shape))])
    else:
        axes, rest = (tuple(others), []) if pixels else (tuple(others[:1]), others[1:])
        if not axes:
            raise Placeless("its result has no axis besides samples and features")
        count = math.prod(shape[d] for d in axes)
        ids = torch.arange(count).view([s if d in axes else 1 for d, s in enumerate(shape)])
        if n > 1:
            samples = torch.arange(n).view([n if d == axis else 1 for d in range(len(shape))])
            ids = samples * count + ids
    if any(shape[d] == count for d in rest) and count > 1:
        raise Placeless(f"its result has two axes of {count}, either of which may be meant")
    return Split(count, ids, axis, axes)


def _samples_axis(shape: Sequence[int], layout: Layout, n: int) -> tuple[int, int]:
    """The samples' axis, and how many indices of it each sample has."""
    if layout.ids is not None:
        raise Placeless("its rows go where the data say")
    outer = shape[layout.axis] // (n * layout.inner)
    if outer > 1 and layout.inner > 1:
        raise Placeless("the samples' axis holds two other axes")
    return layout.axis, outer * layout.inner


def _features(use: Use, firing: Firing, rank: int) -> tuple[set[int], bool]:
    """The result's axes that belong to the parameter, and whether all others are pixels."""
    if use.operator in _CHANNELS:
        return {1}, True
    if use.operator in ("layer_norm", "rms_norm"):
        shape = use.bind(firing, "input", "normalized_shape")[1]
        return set(range(rank - len(shape), rank)), False
    if use.operator in _PRODUCTS:
        found = parameter_axes(use, firing, rank)
        if found is not None:
            return found, False
    return {rank - 1}, False


def splits_of(use: Use, firing: Firing, n: int) -> list[Split | None]:
    """For each result that received a gradient."""
    if use.operator == CUSTOM:
        raise Placeless("its backward adds them up")
    found: list[Split | None] = []
    for layout, grad in zip(use.out_layouts, firing.grads, strict=True):
        if grad is None:
            found.append(None)
        else:
            features, pixels = _features(use, firing, grad.dim())
            if grad.is_sparse:
                raise Placeless("its gradient is sparse")
            found.append(split(grad.shape, layout, n, features, pixels))
    if len({s.count for s in found if s is not None}) > 1:
        raise Placeless("its results have different numbers of positions")
    return found


def _split_positions(form: Form | OfTable | None, firing: Firing, at: Split, n: int) -> Form | None:
    """Forms that hold their positions already (and what counts within a sample stays so)."""
    grad = firing.grads[0]
    assert grad is not None
    if isinstance(form, Rows):
        sample = at.ids.to(form.device).expand(*grad.shape[:-1], 1).reshape(-1)
        return Rows(sample, form.index, form.values, n * at.count, form.shape)
    if isinstance(form, Patches):
        if not at.axes:  # several images of one sample
            return Patches(form.x, form.grad, form.weight, form.geometry)
        return Pixels(form) if form.images == 1 else None
    if isinstance(form, Dense) and grad.dim() > 2 and at.axes and at.samples == 0:  # a bias
        rows = grad.flatten(2).transpose(1, 2).reshape(n * at.count, -1)
        return Dense(rows.to(wide(rows.dtype)))
    return None


def contributions(
    context: Context, collector: Collector, kept: Sequence[Contribution], names: Sequence[str],
    direction: Mapping[str, Tensor] | None, n: int,
) -> Tensor:  # fmt: skip
    """(n, T): shares of ‖gᵢ‖², or of ⟨gᵢ, V⟩."""
    wanted, sources = set(names), collector.sources
    chosen = [e for e in kept if wanted.intersection(sources(e.operand))]
    splits, count = _common_split(collector, chosen, n)
    out = torch.zeros(n, count)
    for name in names if n and count else ():  # one parameter's pieces at a time
        forms = []
        for entry, where in zip(chosen, splits, strict=True):
            if name in sources(entry.operand):
                fine = _finer(context, entry, where, n)
                forms += [form for _, form in collector.attached(fine, {name})]
        if any(isinstance(form, Joint) for form in forms):
            raise UsageError(
                f"{name!r} has a hook, or a custom function, between it and where it was used",
                why="what that makes of a sample's gradient is not the sum over its positions",
                fix="leave it out: tape.positions(params=lambda name: ...)",
            )
        if forms:
            form = total(forms)
            if direction is None:
                found = shares(form, n)
            else:
                found = form.dot(direction[name].detach()).view(n, count)
            out = out.to(found.device) + found
    return out


def _finer(
    context: Context, entry: Contribution, splits: list[Split | None], n: int
) -> Contribution:
    """One contribution with the form of all gᵢₜ."""
    use, firing, rules = entry.use, entry.firing, context.options.rules
    assert firing is not None
    at = entry.operand.position
    where = next(k for k, o in enumerate(use.operands) if o.position == at)
    first = next(s for s in splits if s is not None)
    if use.operator == "embedding" or use.operator.startswith("conv"):
        forms, _ = forms_of(use, firing, n, rules, positions=True)
        found = _split_positions(forms[where], firing, first, n)
        if found is not None:
            return replace(entry, form=found)
    device = entry.operand.value.device
    layouts = [
        layout if s is None else Layout(0, 1, s.ids.to(device))
        for layout, s in zip(use.out_layouts, splits, strict=True)
    ]
    finer = copy(use)
    finer.tapped = replace(use.tapped, layouts=layouts)
    forms, _ = forms_of(finer, firing, n * first.count, rules, positions=True)
    form, operand = forms[where], use.operands[where]
    assert form is not None
    if isinstance(form, OfTable):
        table = table_behind(operand, context.parameters.selected)
        return replace(entry, operand=table, form=form.rows)
    # the rule before may have answered for the table
    return replace(entry, operand=operand, form=form)


def _common_split(
    collector: Collector, entries: Sequence[Contribution], n: int
) -> tuple[list[list[Split | None]], int]:
    """The splits of all entries; refused where they have different lengths, or none."""
    found: list[list[Split | None]] = []
    lengths: dict[int, list[str]] = {}
    for entry in entries:
        name = collector.sources(entry.operand)[0]
        if entry.firing is None:
            raise UsageError(
                "positions were not kept",
                why="biases and norm layers are summed over positions as soon as possible",
                fix="record(model, positions=True)",
            )
        try:
            if not n:
                return [], 0
            splits = splits_of(entry.use, entry.firing, n)
        except Placeless as none:
            raise UsageError(
                f"{name!r} has no positions where {entry.use.operator} used it: {none}",
                where=describe(entry.use.place),
                fix="leave it out: tape.positions(params=lambda name: ...)",
            ) from None
        found.append(splits)
        lengths.setdefault(next(s.count for s in splits if s is not None), []).append(name)
    if len(lengths) > 1:
        counts = "; ".join(f"{k} of {v[0]!r} and {len(v) - 1} more" for k, v in lengths.items())
        raise UsageError(
            f"parameters were used with different numbers of positions: {counts}",
            fix="ask for those that agree: tape.positions(params=lambda name: ...)",
        )
    return found, next(iter(lengths), 0)
