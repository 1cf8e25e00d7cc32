"""What a rule registered with ``implements_per_sample_grads`` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError, describe, here
from .batch_checks import expect_batch, mixture
from .expanded_weights_impl import ExpandedWeight
from .sample_rows import accumulate, filled_up


def standard_kwargs(
    kwarg_names: Sequence[str], expanded_args: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split ``(*args, *kwarg_values)`` again: (args, kwargs)."""
    count = len(expanded_args) - len(kwarg_names)
    values = expanded_args[count:]
    return tuple(expanded_args[:count]), dict(zip(kwarg_names, values, strict=True))


def forward_helper(
    func: Callable[..., Any], expanded_args: Sequence[Any], expanded_kwargs: Mapping[str, Any]
) -> Any:
    """Check the arguments and run the function on the original weights.

    >>> import torch
    >>> weight = ExpandedWeight(torch.randn(2, 3, requires_grad=True), 4, "sum")
    >>> forward_helper(torch.nn.functional.linear, (torch.randn(4, 3), weight), {}).shape
    torch.Size([4, 2])
    """
    args, kwargs = _check_and_unexpand_args(func, expanded_args, expanded_kwargs)
    return func(*args, **kwargs)


def _check_and_unexpand_args(
    func: Callable[..., Any], expanded_args: Sequence[Any], expanded_kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the original weights, if the first one holds the samples expected."""
    expect_batch(func, expanded_args, expanded_kwargs)
    kwargs = {name: _original(value) for name, value in expanded_kwargs.items()}
    return tuple(_original(value) for value in expanded_args), kwargs


def _original(value: Any) -> Any:
    return value.orig_weight if isinstance(value, ExpandedWeight) else value


def unpack_expanded_weight_or_tensor(
    maybe_expanded_weight: Any, func: Callable[[Tensor], Any] = lambda x: x
) -> Any:
    """``func`` of the original, or of a tensor without gradient; None for anything else."""
    if isinstance(maybe_expanded_weight, ExpandedWeight):
        return func(maybe_expanded_weight.orig_weight)
    if not isinstance(maybe_expanded_weight, Tensor):
        return None
    if maybe_expanded_weight.requires_grad:
        raise mixture(maybe_expanded_weight)
    return func(maybe_expanded_weight)


def set_grad_sample_if_exists(
    maybe_expanded_weight: Any, per_sample_grad_fn: Callable[[Any], Tensor]
) -> None:
    """Add ``per_sample_grad_fn(original)``, (batch, *shape), to the original's grad_sample."""
    original = unpack_expanded_weight_or_tensor(maybe_expanded_weight)
    if not isinstance(maybe_expanded_weight, ExpandedWeight):
        return
    rows = maybe_scale_by_batch_size(per_sample_grad_fn(original).detach(), maybe_expanded_weight)
    rows = filled_up(rows, maybe_expanded_weight.batch_size)
    accumulate(original, rows.clone(memory_format=torch.contiguous_format))


def maybe_scale_by_batch_size(grad_sample: Tensor, expanded_weight: ExpandedWeight) -> Tensor:
    """Times the batch size, if the loss is a mean over samples."""
    if expanded_weight.loss_reduction == "mean":
        return grad_sample * expanded_weight.batch_size
    return grad_sample


def sum_over_all_but_batch_and_last_n(tensor: Tensor, n_dims: int) -> Tensor:
    """Sum away every axis but the first and the last ``n_dims``."""
    between = list(range(1, tensor.dim() - n_dims))
    return tensor.sum(between) if between else tensor


def is_batch_first(expanded_args_and_kwargs: Iterable[Any]) -> bool | None:
    """What the expanded weights among the arguments say; None if there is none."""
    said = {e.batch_first for e in expanded_args_and_kwargs if isinstance(e, ExpandedWeight)}
    if len(said) > 1:
        raise UsageError(
            "Got conflicting batch_first arguments in the same layer",
            where=describe(here()),
            why="some Expanded Weights say that samples are on axis 0, some on axis 1",
            fix="set_batch_first on all of them alike",
        )
    return said.pop() if said else None
