"""Operators that look at data another way: views and reshapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ...errors import Mixing
from ..call import Call, Result
from ..layout import Layout, align, explicit, ids_of, remap
from ..operators import rule
from ..reshaping import kept_axes, squeeze_colours
from ..reshaping import reshape as reshape_layout
from ..views import place_of, shown_by

# all tensors among the arguments are moved
_ALL_MOVED = frozenset(
    """block_diag select_scatter slice_scatter diagonal_scatter broadcast_tensors meshgrid
    atleast_1d atleast_2d atleast_3d""".split()
)


def probe(call: Call) -> Any:
    """Run the operator on colours instead of values; returns colours (-1: no sample).

    Colours are shifted by one, so that zeros an operator fills in mean "no sample". Constants have
    zeros, too, whatever their dtype; only numbers behind the first argument (how often, how long,
    where to cut) stay what they are.
    """

    def colour(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        layout = call.layout(value)
        if layout is not None:
            ids = ids_of(layout, value.shape, call.n, value.device) + 1
            return ids.expand(value.shape)
        return torch.zeros((), dtype=torch.long, device=value.device).expand(value.shape)

    given: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    first = next((key for key in (0, "input", "self") if key in given), None)
    for key, value in given.items():
        number = isinstance(value, Tensor) and not value.is_floating_point()
        if key == first or not number or call.name in _ALL_MOVED:
            given[key] = tree_map(colour, value)
    args = [given.pop(position) for position in range(len(call.args))]
    out = call.func(*args, **given)
    return tree_map(lambda t: squeeze_colours(t - 1, call.n) if isinstance(t, Tensor) else t, out)


def probe_layouts(call: Call) -> Result | list[Result]:
    """Layouts from a probe, also where every tensor is moved on its own."""
    out = probe(call)
    if isinstance(out, Tensor):
        return explicit(out, call.n)
    return [explicit(ids, call.n) for ids in out]


def source_of(call: Call) -> tuple[Any, Layout]:
    """The first argument and its layout."""
    x = call.arg(0, "input", "self")
    layout = call.layout(x)
    if layout is None:
        raise Mixing(f"{call.name}: only a size argument holds samples")
    return x, layout


@rule("view reshape flatten unflatten ravel view_as reshape_as _unsafe_view view_copy", linear=True)
def reshape(call: Call) -> Result:
    """Row-major order is kept, so only the two shapes matter."""
    x = call.arg(0, "input", "self")
    layout = call.layout(x)
    if layout is not None and call.name == "view" and isinstance(call.arg(1, "dtype"), torch.dtype):
        if x.dim() - 1 in layout.axes:
            raise Mixing("viewing another dtype splits elements")
        return layout
    return (
        None
        if layout is None
        else reshape_layout(layout, x.shape, call.out.shape, call.n, x.device)
    )


@rule("expand expand_as broadcast_to expand_copy", linear=True)
def expand(call: Call) -> Result:
    """Adds axes on the left; an axis of one is repeated."""
    x, layout = source_of(call)
    return align(layout, x.shape, call.out.shape, call.n)


# every tensor on its own, on the colours
rule(
    "flip fliplr flipud roll rot90 repeat tile diag diag_embed diagflat block_diag "
    "broadcast_tensors atleast_1d atleast_2d atleast_3d meshgrid",
    linear=True,
)(probe_layouts)


def view(call: Call) -> Result | list[Result]:
    """Axes change places, come, go or are cut; where samples are cut, run on their colours."""
    x, layout = source_of(call)
    copied = call.name.endswith("_copy")
    func = getattr(torch.ops.aten, call.name[: -len("_copy")]) if copied else call.func
    others = {name: value for name, value in call.kwargs.items() if value is not x}
    places, rank = kept_axes(x.shape, lambda t: func(t, *call.args[1:], **others))
    if any(places[d] is None for d in layout.axes):
        return probe_layouts(call)
    return remap(layout, places, rank)


rule(
    "permute transpose swapaxes swapdims t T H mT mH adjoint movedim moveaxis unsqueeze squeeze "
    "unfold permute_copy transpose_copy t_copy unsqueeze_copy squeeze_copy",
    linear=True,
)(view)
rule(
    "select narrow unbind chunk split split_with_sizes tensor_split hsplit vsplit dsplit "
    "diagonal unsafe_chunk unsafe_split unsafe_split_with_sizes unfold_copy narrow_copy "
    "select_copy split_copy split_with_sizes_copy unbind_copy slice linalg_diagonal slice_copy "
    "diagonal_copy",
    linear=True,
    routes=True,
)(view)


@rule("as_strided", linear=True)
def as_strided(call: Call) -> Result:
    """Colours are laid out in memory as the tensor is, and viewed the same way."""
    x, layout = source_of(call)
    found = shown_by(layout, place_of(x), call.out, call.n)
    if found is None:
        raise Mixing("as_strided of elements that are not the tensor's own")
    return found
