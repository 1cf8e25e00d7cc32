"""One contraction of data with a parameter, whatever it is called.

Letters of the parameter: k shared with data and output (blocks), i contracted with data, o only in
the output. Letters of the data besides: positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..forms import Form, Outer, Part
from ..layouts.layout import Layout, remap
from ..layouts.views import contiguous_strides
from .by_sample import Unsuited, by_sample


def contraction(
    x: Tensor, data: str, weight: Tensor, mine: str, grad: Tensor, out: str, layout: Layout, n: int
) -> Form:
    """The form of ``weight`` in ``einsum(f"{data},{mine}->{out}", x, weight)``."""
    shape = weight.shape
    if 1 in shape or 1 in x.shape:
        x, data, weight, mine = _drop_repeated(x, data, weight, mine, out)
    _check(x, data, weight, mine, grad, out)
    if grad.is_complex() and not weight.is_complex():  # the weight's gradient is its real part
        raise Unsuited
    x = x.conj() if x.is_complex() else x
    if any((c in data) + (c in mine) + (c in out) < 2 for c in data + mine + out):
        raise Unsuited  # summed in one term alone, or repeated
    k = [c for c in mine if c in data and c in out]
    i = [c for c in mine if c in data and c not in out]
    o = [c for c in mine if c not in data and c in out]
    positions = [c for c in out if c not in mine]
    left = _arrange(grad, out, positions, k, o, layout, n)
    axis_layout = move_layout(layout, out, data)
    right = _arrange(x, data, positions, k, i, axis_layout, n)
    sizes = dict(zip(mine, weight.shape, strict=True))
    if "".join(mine) == "".join(k + o + i):
        return Outer(left, right, shape)
    if "".join(mine) == "".join(k + i + o):
        return Outer(right, left, shape)
    order = k + o + i
    form = Outer(left, right, torch.Size(sizes[c] for c in order))
    strides = dict(zip(mine, contiguous_strides(weight.shape), strict=True))
    return Part(form, shape, tuple(strides[c] for c in order), 0)


def _drop_repeated(
    x: Tensor, data: str, weight: Tensor, mine: str, out: str
) -> tuple[Tensor, str, Tensor, str]:
    """Both terms without axes of size one that are repeated.

    A capsule's matrices (1, i, c, a, b) multiply vectors (n, i, 1, b, 1): they are repeated over
    the samples, the vectors over c.
    """
    for d in reversed([d for d, s in enumerate(weight.shape) if s == 1]):
        if mine[d] in data and mine[d] in out:
            weight, mine = weight.select(d, 0), mine[:d] + mine[d + 1 :]
    sizes = dict(zip(mine, weight.shape, strict=False))
    for d in reversed([d for d, s in enumerate(x.shape) if s == 1]):
        if sizes.get(data[d], 1) != 1:
            x, data = x.select(d, 0), data[:d] + data[d + 1 :]
    return x, data, weight, mine


def _check(x: Tensor, data: str, weight: Tensor, mine: str, grad: Tensor, out: str) -> None:
    sizes: dict[str, int] = {}
    for tensor, letters in ((x, data), (weight, mine), (grad, out)):
        if len(set(letters)) != len(letters) or tensor.dim() != len(letters):
            raise Unsuited
        for letter, size in zip(letters, tensor.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise Unsuited


def move_layout(layout: Layout, out: str, data: str) -> Layout:
    """The output's layout on the data's axes (the samples' axis is a position of both)."""
    places = [data.index(c) if c in data else None for c in out]
    return remap(layout, places, len(data))


def _arrange(
    x: Tensor,
    letters: str,
    positions: list[str],
    k: list[str],
    last: list[str],
    layout: Layout,
    n: int,
) -> Tensor:
    """(n, k, t, last): samples first, then blocks, positions, and the matrix axis."""
    order = "".join([*positions, *k, *last])
    if any(letters[d] not in positions for d in layout.axes):
        raise Unsuited
    moved = x.permute([letters.index(c) for c in order])
    rows = by_sample(moved, move_layout(layout, letters, order), n, len(k) + len(last))
    blocks, width = (math.prod(x.shape[letters.index(c)] for c in each) for each in (k, last))
    return rows.reshape(rows.shape[0], rows.shape[1], blocks, width).transpose(1, 2)
