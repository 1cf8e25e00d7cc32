"""What a rule registered with ``implements_per_sample_grads`` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError, describe, here
from .weight import ExpandedWeight


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
    """Check the arguments and run the function on the original weights."""
    expect_batch(func, expanded_args, expanded_kwargs)
    args = [_original(a) for a in expanded_args]
    return func(*args, **{name: _original(value) for name, value in expanded_kwargs.items()})


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


def filled_up(rows: Tensor, count: int) -> Tensor:
    """Rows of zeros after those of a smaller batch, which holds the first samples."""
    missing = count - rows.shape[0]
    if missing <= 0:
        return rows
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def accumulate(weight: Tensor, rows: Tensor) -> None:
    """Set ``grad_sample``, or replace it by the sum: what was handed out is not written to."""
    known = getattr(weight, "grad_sample", None)
    weight.grad_sample = rows if known is None else known + rows  # type: ignore[attr-defined]


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
        told = [getattr(w, name) for w in weights]
        other = next((t for t in told if t != told[0]), None)
        if other is not None:
            raise UsageError(
                f"Expected ExpandedWeights to all have the same {name} argument but got one with "
                f"{told[0]} and one with {other}",
                where=_place(func),
                why="they meet the same samples, and one loss",
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


def _original(value: Any) -> Any:
    return value.orig_weight if isinstance(value, ExpandedWeight) else value
