"""``torch.rnn_tanh``, ``rnn_relu``, ``gru`` and ``lstm`` with expanded weights.

Each is called as (input, hx, weights, …, batch_first), or as (data, batch_sizes, hx, weights, …)
for packed sequences.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import UsageError, describe, here
from .batch_checks import expect_size, mixture
from .expanded_weights_impl import ExpandedWeight, expanded_weights_rnn_decomps
from .recorded_call import Call, record_call


def on_sequences(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Sequences of one length; the last argument says which axis holds the samples."""
    _expect_positions(function, args, kwargs)
    axis = 0 if args[8] else 1
    size = args[0].shape[axis]
    _expect_weights(function, args[0], size, args[2])
    return record_call(Call(function, args, {}), args[2], args[0], size, axis)


def on_packed_sequences(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Packed sequences: the first time step holds every sample."""
    _expect_positions(function, args, kwargs)
    size = int(args[1][0])
    _expect_weights(function, args[0], size, args[3])
    data = _as_given(args[0], args[1])
    return record_call(Call(function, args, {}), args[3], data, size, 0)


for _function in (torch.rnn_tanh, torch.rnn_relu, torch.gru, torch.lstm):
    expanded_weights_rnn_decomps[_function] = (
        functools.partial(on_sequences, _function),
        functools.partial(on_packed_sequences, _function),
    )


def _expect_positions(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if kwargs or len(args) != 9:
        raise UsageError(
            f"Expanded Weights cannot handle function {function.__name__} called this way",
            where=describe(here()),
            why="its nine arguments are looked up by position",
            fix="call it as torch.nn does, or use the module",
        )


def _expect_weights(function: Any, data: Tensor, size: int, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        if isinstance(weight, ExpandedWeight):
            expect_size(function, data, size, weight)
        elif weight.requires_grad:
            raise mixture(weight)


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
