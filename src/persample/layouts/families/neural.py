"""Convolution, pooling, normalisation, resampling and recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import Mixing
from ..call import Call, Places, Result, carry, collect, gather_colours, trailing
from ..layout import explicit, ids_of
from ..operators import rule
from ..reshaping import colour_groups

_CONV = {"conv1d": 1, "conv2d": 2, "conv3d": 3,
         "conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}  # fmt: skip


@rule(" ".join(_CONV))
def convolution(call: Call) -> Result:
    """Batch first; or samples as groups of channels that do not interact."""
    x, width = call.arg(0, "input"), _CONV[call.name] + 1
    layout = call.layout(x)
    if layout is not None and layout.axes == (1,) and x.dim() > width:
        return _by_groups(call, x, call.arg(6, "groups", default=1))
    finds = layout is None and x.dim() > width and "transpose" not in call.name
    if finds:  # what a filter finds is of its sample
        weight = call.arg(1, "weight")
        filters: Places = [1, *[None] * (weight.dim() - 1)]
        return gather_colours(call, [(weight, filters), (call.arg(2, "bias"), [1])], call.out)
    return carry(call, [(x, trailing(x, width))], call.out, trailing(call.out, width))


def _by_groups(call: Call, x: Tensor, groups: int) -> Result:
    """Samples on the channel axis of a grouped convolution (one filter bank per sample)."""
    places, rows = [], []
    for tensor, axis in ((x, 1), (call.arg(1, "weight"), 0), (call.arg(2, "bias"), 0)):
        layout = call.layout(tensor)
        if layout is not None:
            if any(d != axis for d in layout.axes):
                raise Mixing("filters hold samples on an axis that is summed over")
            rows.append(call.colours(tensor).flatten().expand(tensor.shape[axis]))
            each = torch.arange(groups, device=x.device)
            places.append(each.repeat_interleave(tensor.shape[axis] // groups))
    why = "the convolution combines channels and filters of several samples"
    found = colour_groups(torch.cat(places), torch.cat(rows), groups, why=why)
    colours = found.repeat_interleave(call.out.shape[1] // groups)
    return explicit(colours.view(1, -1, *[1] * (call.out.dim() - 2)), call.n)


_POOL = {
    "avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3, "max_pool1d": 1, "max_pool2d": 2,
    "max_pool3d": 3, "max_pool1d_with_indices": 1, "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3, "adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 2,
    "adaptive_avg_pool3d": 3, "adaptive_max_pool1d": 1, "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3, "max_unpool2d": 2, "max_unpool3d": 3, "upsample_linear1d": 1,
    "upsample_nearest1d": 1, "_upsample_nearest_exact1d": 1, "upsample_nearest2d": 2,
    "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "_upsample_nearest_exact2d": 2,
    "_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2, "upsample_nearest3d": 3,
    "upsample_trilinear3d": 3, "_upsample_nearest_exact3d": 3, "pixel_shuffle": 3,
    "pixel_unshuffle": 3,
}  # fmt: skip


@rule(" ".join(_POOL))
def pooling(call: Call) -> Result:
    """Works on the trailing axes only."""
    count = _POOL.get(call.name) or int(call.name[-2])
    operands = [(t, trailing(t, count)) for t in call.tensors() if t.dim() >= count]
    return carry(call, operands, call.first, trailing(call.first, count))


_PADS = "reflection_pad1d reflection_pad2d reflection_pad3d"
rule(f"{_PADS} {_PADS.replace('reflection', 'replication')}", linear=True)(pooling)


@rule("channel_shuffle native_channel_shuffle conv_tbc")
def other_axes(call: Call) -> Result:
    """Permutes the channels; or (time, batch, channels)."""
    core = {0, 2} if call.name == "conv_tbc" else {1}
    return carry(call, [(call.arg(0, "input"), core)], call.out, core)


# the number of axes below which an operator has no batch
_LEAST = {
    "instance_norm": 3, "col2im": 3, "im2col": 4, "fractional_max_pool2d": 4,
    "fractional_max_pool3d": 5,
}  # fmt: skip


@rule(
    "affine_grid_generator group_norm native_group_norm instance_norm fractional_max_pool2d "
    "fractional_max_pool3d"
)
def batch_first(call: Call) -> Result | list[Result]:
    """Within each sample of axis 0; random offsets are drawn for each of them."""
    x = call.arg(0, "input", "self", "theta")
    width = max(x.dim(), _LEAST.get(call.name, 0)) - 1
    operands = [(x, trailing(x, width))]
    if isinstance(call.out, Tensor):
        return carry(call, operands, call.out, range(1, call.out.dim()))
    return [carry(call, operands, t, range(1, t.dim())) for t in collect(call.out)]


rule("im2col col2im", linear=True)(batch_first)


@rule("grid_sampler grid_sampler_2d grid_sampler_3d")
def grid_sampler(call: Call) -> Result:
    """A point of the grid gives a point of the result: it looks at all pixels of its channels."""
    x, grid = call.arg(0, "input"), call.arg(1, "grid")
    pixels: Places = [None] * (x.dim() - 2)
    return gather_colours(
        call, [(x, [0, 1, *pixels]), (grid, [0, *range(2, x.dim()), None])], call.out
    )


@rule("layer_norm rms_norm native_layer_norm _fused_rms_norm")
def layer_norm(call: Call) -> Result | list[Result]:
    """Over the trailing axes that normalized_shape names."""
    x, shape = call.arg(0, "input"), call.arg(1, "normalized_shape")
    core = trailing(x, len(shape))
    if isinstance(call.out, Tensor):
        return carry(call, [(x, core)], call.out, core)
    return [carry(call, [(x, core)], o, core) if o.dim() == x.dim() else None for o in call.out]


@rule("batch_norm native_batch_norm")
def batch_norm(call: Call) -> Result:
    """Element by element in eval mode; over the batch in training mode."""
    x = call.arg(0, "input")
    if call.arg(5, "training"):
        raise Mixing(
            "BatchNorm in training mode normalises with statistics of the whole batch, so no "
            "sample has a gradient of its own",
            "put the layer in eval() mode, or replace it by GroupNorm or LayerNorm",
        )
    return carry(call, [(x, ())], call.out)


_RNN = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@rule(" ".join(_RNN))
def recurrent(call: Call) -> Result | list[Result]:
    """(time, batch, features), or packed rows with their batch sizes."""
    x, second = call.args[0], call.args[1]
    if isinstance(second, Tensor) and second.dim() == 1 and not second.is_floating_point():
        return _packed_recurrence(call, x, second)
    states = _states(call, call.arg(1, "hx"), x)
    batch = 0 if call.arg(8, "batch_first") else 1
    if x.dim() != 3:
        raise Mixing("a recurrent layer on an unbatched input")
    operands = [(x, {1 - batch, 2}), *((state, {0, 2}) for state in states)]
    for tensor, core in operands:
        layout = call.layout(tensor)
        if layout is not None and not core.isdisjoint(layout.axes):
            raise Mixing(
                f"a recurrent layer runs along the samples (they must be on axis {1 - min(core)})"
            )
    each = zip(call.out, operands, strict=True)
    return [carry(call, operands, out, core) for out, (_, core) in each]


def _states(call: Call, hidden: Any, x: Tensor) -> list[Any]:
    """The hidden states of a recurrent layer, which alone may hold samples besides the data."""
    states = list(hidden) if isinstance(hidden, (tuple, list)) else [hidden]
    if not {id(x), *map(id, states)}.issuperset(call.layouts):
        raise Mixing("the weights of a recurrent layer hold samples")
    return states


def _packed_recurrence(call: Call, x: Tensor, sizes: Tensor) -> list[Result]:
    """Packed rows: each slot must hold one sample from its first to its last step."""
    layout, states = call.layout(x), _states(call, call.args[2], x)
    if layout is None:
        raise Mixing("packed data without known samples, but a hidden state with samples")
    rows = ids_of(layout, x.shape, call.n, x.device).expand(x.shape[0], -1)[:, 0]
    slots = rows[: int(sizes[0])]
    index = torch.cat([torch.arange(int(s), device=x.device) for s in sizes])
    if bool((slots[index] != rows).any()):
        raise Mixing("a slot of the packed sequence changes its sample")
    for state in states:
        own = call.colours(state)
        apart = own.shape[0] != 1 or own.shape[2] != 1 or bool((own.flatten() != slots).any())
        if apart and call.layout(state) is not None:
            raise Mixing("hidden state and packed data hold their samples in different places")
    last = explicit(slots.view(1, -1, 1), call.n)
    return [explicit(rows.view(-1, 1), call.n), *(last for _ in call.out[1:])]


@rule("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def cell(call: Call) -> Result:
    """Row by row."""
    x = call.arg(0, "input")
    tensors = [x, *_states(call, call.arg(1, "hx"), x)]
    return carry(call, [(t, {-1}) for t in tensors if t is not None], call.first, {-1})


@rule("_pack_padded_sequence _pad_packed_sequence", linear=True, routes=True)
def pack(call: Call) -> list[Result]:
    """Rows by time, then by sample; or back to (time, batch), where padding is of no sample.

    The operator runs on the colours of a single feature: the others have the same.
    """
    x, *others = call.args
    layout, lead = call.layout(x), 2
    if call.name == "_pad_packed_sequence":
        lead, others[2] = 1, -1
    if layout is None or any(d >= lead for d in layout.axes):
        raise Mixing("packed sequences need the samples on the batch axis")
    ids = call.colours(x)
    colours = call.func(ids.reshape(ids.shape[:lead]).expand(x.shape[:lead]), *others)[0]
    rest = (1,) * (call.out[0].dim() - colours.dim())
    return [call.painted(colours.view(*colours.shape, *rest)), None]
