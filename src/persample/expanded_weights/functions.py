"""The functions that take ExpandedWeights directly: each call is a small module, recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import UsageError, describe, here
from ..kinds import taken_apart
from .contract import (
    expect_alike,
    expect_batch,
    expect_size,
    is_batch_first,
    mixture,
    standard_kwargs,
)
from .own import BUILT_IN
from .stretch import Batch, run
from .weight import ExpandedWeight, implements_per_sample_grads

_CONVOLUTIONS = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}


class Call(nn.Module):
    """One call of a function; its expanded weights are the parameters.

    ``forward`` takes the data that may carry gradients, the samples first.
    """

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.leaves, self.template = taken_apart(args, kwargs)
        self.places: list[int] = []
        weights: dict[int, str] = {}
        self.weights: list[tuple[int, str]] = []
        for k, leaf in enumerate(self.leaves):
            if isinstance(leaf, ExpandedWeight):
                name = weights.setdefault(id(leaf.orig_weight), str(len(weights)))
                self._parameters[name] = leaf.orig_weight  # type: ignore[assignment]
                self.weights.append((k, name))
            elif isinstance(leaf, Tensor):
                self.places.append(k)

    def data(self) -> list[Tensor]:
        """The tensors that are not expanded."""
        return [self.leaves[k] for k in self.places]

    def forward(self, *data: Any) -> Any:
        """The function on these data and the original weights."""
        leaves = list(self.leaves)
        for k, value in zip(self.places, data, strict=True):
            leaves[k] = value.data if isinstance(value, PackedSequence) else value
        for k, name in self.weights:
            leaves[k] = self._parameters[name]
        args, kwargs = self.template.call(leaves)
        return self.function(*args, **kwargs)


@implements_per_sample_grads(F.linear)
@implements_per_sample_grads(F.conv1d)
@implements_per_sample_grads(F.conv2d)
@implements_per_sample_grads(F.conv3d)
@implements_per_sample_grads(F.embedding)
@implements_per_sample_grads(F.layer_norm)
@implements_per_sample_grads(F.group_norm)
@implements_per_sample_grads(F.instance_norm)
class Function:
    """Functions with the data as first argument and the weights beside it."""

    @staticmethod
    def apply(kwarg_names: tuple[str, ...], function: Any, *values: Any) -> Any:
        """Check, then record."""
        args, kwargs = standard_kwargs(kwarg_names, values)
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        expect_batch(function, args, kwargs)
        _expect_axes(function, args[0], args, kwargs)
        call = Call(function, args, kwargs)
        for tensor in call.data()[1:]:
            if tensor.requires_grad:
                raise mixture(tensor)
        axis = 0 if is_batch_first(values) else 1
        return _recorded(call, values, args[0], args[0].shape[axis], axis)


@implements_per_sample_grads(torch.rnn_tanh)
@implements_per_sample_grads(torch.rnn_relu)
@implements_per_sample_grads(torch.gru)
@implements_per_sample_grads(torch.lstm)
class Recurrent:
    """Recurrent layers: (input, hx, weights, …, batch_first), or (data, batch_sizes, hx, …)."""

    @staticmethod
    def apply(kwarg_names: tuple[str, ...], function: Any, *values: Any) -> Any:
        """The samples are where the layer's own arguments say."""
        args, kwargs = standard_kwargs(kwarg_names, values)
        if kwargs or len(args) != 9:
            raise UsageError(
                f"Expanded Weights cannot handle function {function.__name__} called this way",
                where=describe(here()),
                why="its nine arguments are looked up by position",
                fix="call it as torch.nn does, or use the module",
            )
        packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()
        weights = args[3] if packed else args[2]
        data = _as_given(args[0], args[1]) if packed else args[0]
        axis = 0 if packed or args[8] else 1
        size = int(args[1][0]) if packed else args[0].shape[axis]
        for weight in weights:
            if isinstance(weight, ExpandedWeight):
                expect_size(function, args[0], size, weight)
            elif weight.requires_grad:
                raise mixture(weight)
        return _recorded(Call(function, args, {}), weights, data, size, axis)


BUILT_IN.update((Function, Recurrent))


def _as_given(data: Tensor, batch_sizes: Tensor) -> PackedSequence:
    """The packed sequence with the caller's order of samples, which the functions do not see.

    torch's layer keeps that order in its own frame while it calls the function.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_filename == nn.modules.rnn.__file__
            and frame.f_code.co_name == "forward"
        ):
            found = frame.f_locals
            if found.get("batch_sizes") is batch_sizes:
                orders = (found.get("sorted_indices"), found.get("unsorted_indices"))
                return PackedSequence(data, batch_sizes, *orders)
        frame = frame.f_back  # type: ignore[assignment]
    return PackedSequence(data, batch_sizes)


def _recorded(call: Call, values: Sequence[Any], first: Any, size: int, axis: int) -> Any:
    """Run the call; only its first argument holds samples."""
    weights = [v for v in values if isinstance(v, ExpandedWeight)]
    expect_alike(call.function, weights, "loss_reduction", "batch_size")
    batch = Batch(size, axis, weights[0].loss_reduction, weights[0].batch_size)
    data = (first, *call.data()[1:])
    return run(call, data, {}, batch, shared=True, constants=range(1, len(data)))


def _expect_axes(function: Any, data: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse data without an axis for samples."""
    rank = data.dim()
    why = ""
    if function is F.linear and rank < 2:
        why = f"linear needs an input of at least rank 2, got rank {rank}"
    elif function in _CONVOLUTIONS and rank != _CONVOLUTIONS[function]:
        why = f"a batch of images has rank {_CONVOLUTIONS[function]}, got rank {rank}"
    elif function is F.layer_norm:
        normal = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        if len(normal) >= rank:
            why = f"layer_norm over {tuple(normal)} normalises over the batch dimension"
    if why:
        raise UsageError(
            "Expanded Weights expected an input with a batch dimension",
            where=f"{function.__name__} on {tuple(data.shape)}, {describe(here())}",
            why=why,
            fix="add an axis for the samples: x.unsqueeze(0)",
        )
