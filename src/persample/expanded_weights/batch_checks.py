"""What the arguments of a call with expanded weights must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError, describe, here
from .expanded_weights_impl import ExpandedWeight

_RANKS = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}


def expect_batch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a first argument that does not hold the batch its expanded weights were made for."""
    data = args[0] if args else next(iter(kwargs.values()), None)
    what = why = ""
    fix = "pass the data first"
    if isinstance(data, ExpandedWeight):
        what = "Expanded Weights do not support inputs that are also ExpandedWeights."
        why = "the first argument holds the samples; a weight holds none"
    elif not isinstance(data, Tensor):
        what = "Expanded Weights requires a Tensor as the first input to get the batch dimension"
        why = f"the first argument is of type {type(data).__name__}"
    elif data.dim() == 0:
        what = "Expanded Weights requires a batch dimension but got an input of size 0"
        why = "a tensor without axes holds no samples"
        fix = "add an axis: x.unsqueeze(0)"
    elif data.shape[0] == 0:
        what = "0 is not a valid batch size for Expanded Weights"
        why = f"the input has shape {tuple(data.shape)}"
        fix = "call_for_per_sample_grads takes empty batches"
    if what:
        raise UsageError(what, where=_place(func), why=why, fix=fix)
    assert isinstance(data, Tensor)
    weights = [v for v in (*args, *kwargs.values()) if isinstance(v, ExpandedWeight)]
    expect_alike(func, weights, "loss_reduction")
    for weight in weights:
        axis = 0 if weight.batch_first else 1
        expect_size(func, data, data.shape[axis] if axis < data.dim() else 0, weight)


def expect_axes(func: Any, data: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse data of one of our rules that have no axis for samples."""
    rank, why = data.dim(), ""
    if func in _RANKS and rank != _RANKS[func]:
        why = f"a batch of images has rank {_RANKS[func]}, got rank {rank}"
    elif func is F.linear and rank < 2:
        why = f"linear needs an input of at least rank 2, got rank {rank}"
    elif func is F.layer_norm:
        normal = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        if len(normal) >= rank:
            why = f"layer_norm over {tuple(normal)} normalises over the batch dimension"
    if why:
        raise UsageError(
            "Expanded Weights expected an input with a batch dimension",
            where=f"{func.__name__} on {tuple(data.shape)}, {describe(here())}",
            why=why,
            fix="add an axis for the samples: x.unsqueeze(0)",
        )


def expect_size(func: Any, data: Tensor, size: int, weight: ExpandedWeight) -> None:
    """Refuse a batch that the expanded weight was not made for."""
    smaller = weight.allow_smaller_batches and size < weight.batch_size
    if size == weight.batch_size or smaller:
        return
    raise UsageError(
        "Expected ExpandedWeights to have batch size matching input but got input batch size of "
        f"{size} with ExpandedWeight of batch size {weight.batch_size}",
        where=_place(func),
        why=f"an input of shape {tuple(data.shape)} must hold the samples that these Expanded "
        "Weights were made for",
        fix="make them for this batch; set_batch_first, set_allow_smaller_batches",
    )


def expect_alike(func: Any, weights: Sequence[ExpandedWeight], *names: str) -> None:
    """Refuse expanded weights of one call that differ in what they say of its samples."""
    for name in names:
        given = [getattr(w, name) for w in weights]
        other = next((t for t in given if t != given[0]), None)
        if other is not None:
            raise UsageError(
                f"Expected ExpandedWeights to all have the same {name} argument but got one with "
                f"{given[0]} and one with {other}",
                where=_place(func),
                why="they are used with the same samples, and one loss",
                fix="make the Expanded Weights of one call alike",
            )


def _place(func: Any) -> str:
    return f"{getattr(func, '__name__', repr(func))}, {describe(here())}"


def mixture(tensor: Tensor) -> UsageError:
    """The error for a trainable tensor that is not expanded."""
    return UsageError(
        "ExpandedWeights does not support a mixture of ExpandedWeight parameters and normal "
        "Parameters",
        where=f"a tensor of shape {tuple(tensor.shape)}, {describe(here())}",
        why="its gradient would be an ordinary one next to Expanded Weights",
        fix="make it an ExpandedWeight too, or detach it",
    )
