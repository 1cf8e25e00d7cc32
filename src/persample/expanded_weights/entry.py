"""Where users come in: ``call_for_per_sample_grads``."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from ..errors import UsageError, describe, here
from ..inputs.input_trees import differ_in_rows, lists_alike, tensors_of, walk
from ..uses.module_tree import modules_of
from .recorded_graph import multiple_calls, run
from .sample_batch import Batch


def call_for_per_sample_grads(
    module: nn.Module,
    *,
    batch_size: int | None = None,
    loss_reduction: str = "sum",
    batch_first: bool = True,
) -> Callable[..., Any]:
    """A function like ``module.forward`` whose backward leaves ``grad_sample`` on parameters.

    ``grad_sample`` is (n, *shape), row i the gradient through sample i; ``.grad`` stays None.
    ``batch_size``: n, else all tensors among the arguments must agree on it (those in objects, if
    there are no others); if it is given, arguments of other sizes are constants.
    ``loss_reduction``: "mean" if the loss is a mean over samples, so that rows are gradients of
    each sample's own loss. ``batch_first``: samples are on axis 0 of the arguments, else on axis 1.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> call_for_per_sample_grads(model)(torch.randn(4, 3)).sum().backward()
    >>> model.weight.grad_sample.shape
    torch.Size([4, 2, 3])
    """
    _expect(module, batch_size, loss_reduction)
    given = None if batch_size is None else int(batch_size)
    known = modules_of(module).parameters
    _expect_cleared(module, known)
    dim = 0 if batch_first else 1

    @functools.wraps(module.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        n = _inferred(module, args, kwargs, dim) if given is None else given
        trainable = _expect_cleared(module, known) or any(
            p.requires_grad for p in module.parameters()
        )
        if not (trainable and torch.is_grad_enabled()):
            return module(*args, **kwargs)
        return run(module, args, kwargs, Batch(n, dim, loss_reduction, n))

    return call


def _expect(module: Any, batch_size: Any, loss_reduction: Any) -> None:
    if loss_reduction not in ("sum", "mean"):
        raise UsageError(
            f"Expected loss_reduction argument to be sum or mean, got {loss_reduction!r}",
            where=describe(here()),
            why="Expanded Weights scale rows by the batch size for a mean, and not for a sum",
            fix='loss_reduction="mean" for a mean over samples, else "sum"',
        )
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"Module passed must be nn.Module, got {type(module).__name__}",
            where=describe(here()),
            fix="Expanded Weights are made of the parameters of a module: pass one",
        )
    if batch_size is None:
        return
    if not isinstance(batch_size, numbers.Integral) or isinstance(batch_size, bool):
        raise UsageError(
            f"Batch size passed must be None or an integer, got {type(batch_size).__name__}",
            where=describe(here()),
            fix="leave batch_size out, or pass x.shape[0]",
        )
    if int(batch_size) < 1:
        raise UsageError(
            f"Batch size must be positive, got {batch_size}",
            where=describe(here()),
            fix="leave batch_size out: it is taken from the inputs, an empty batch included",
        )


def _expect_cleared(module: nn.Module, parameters: Sequence[nn.Parameter | None]) -> bool:
    """Refuse rows of an earlier batch; whether any parameter is trainable."""
    trainable = False
    for parameter in parameters:
        if getattr(parameter, "grad_sample", None) is not None:
            raise multiple_calls(
                next((n for n, p in module.named_parameters() if p is parameter), "?")
            )
        trainable = trainable or (parameter is not None and parameter.requires_grad)
    return trainable


def _inferred(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> int:
    """The size of axis ``dim``, on which all tensor leaves must agree."""
    leaves: Sequence[Any] = args
    if kwargs or not all(isinstance(v, Tensor) for v in args):
        leaves = tree_leaves((args, kwargs), is_leaf=lambda v: isinstance(v, PackedSequence))
    sizes = [size for leaf in leaves if (size := _size(leaf, dim)) is not None]
    if not sizes:
        hidden = {size for leaf in _hidden(args, kwargs) if (size := _size(leaf, dim)) is not None}
        if len(hidden) == 1:
            return hidden.pop()
        raise UsageError(
            "ExpandedWeights cannot compute the batch size from the inputs",
            where=_place(module),
            why=f"no argument is a tensor with an axis {dim}"
            + (", and those in objects differ" if hidden else ""),
            fix="call_for_per_sample_grads(module, batch_size=n)",
        )
    if any(size != sizes[0] for size in sizes):
        raise _different(module, args, kwargs, dim)
    if leaves is not args:
        _expect_hidden(module, (args, kwargs), sizes[0], dim)
    return sizes[0]


def _different(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int
) -> UsageError:
    """The error for inputs that disagree on the batch size."""
    try:
        named = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # forward will say what is wrong, or has no signature
        named = {f"argument {k}": value for k, value in enumerate(args)} | kwargs
    found: list[tuple[str, int]] = []
    for name, value in named.items():
        leaves, _ = tree_flatten_with_path(value, is_leaf=lambda v: isinstance(v, PackedSequence))
        sizes = [(name + keystr(path), _size(leaf, dim)) for path, leaf in leaves]
        found += [(path, size) for path, size in sizes if size is not None]
    parts = {name: walk(name, value) for name, value in named.items()}
    lists = [some for each in parts.values() for some in lists_alike(each) if differ_in_rows(some)]
    one_each = (
        f"; batch_size={len(lists[0])}, if each tensor of a list is a sample" if lists else ""
    )
    first, size = found[0]
    second, odd = next(item for item in found if item[1] != size)
    return UsageError(
        f"Expanded Weights found at least one input with batch size {size} and one with "
        f"batch size {odd}: {first} and {second}",
        where=_place(module),
        why=f"axis {dim} of every tensor is taken to hold the samples",
        fix=f"call_for_per_sample_grads(module, batch_size={size}), if {second} holds no samples "
        f"(a mask, position ids){one_each}",
    )


def _place(module: nn.Module) -> str:
    return f"{type(module).__name__}, {describe(here())}"


def _size(leaf: Any, dim: int) -> int | None:
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    return leaf.shape[dim] if isinstance(leaf, Tensor) and leaf.dim() > dim else None


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors in dataclasses and other objects of the caller's own."""
    named = [(str(k), value) for k, value in enumerate(args)]
    return [leaf for _, leaf in tensors_of([*named, *kwargs.items()])]


def _expect_hidden(module: nn.Module, arguments: Any, n: int, dim: int) -> None:
    """Tensors in dataclasses do not tell the batch size, but must not contradict it."""
    for path, leaf in walk("arguments", arguments):
        size = _size(leaf, dim)
        if size is not None and size != n:
            raise UsageError(
                f"Expected ExpandedWeights to have batch size matching input but got input batch "
                f"size of {size} with ExpandedWeight of batch size {n}",
                where=f"{path} of {_place(module)}",
                why="the batch size was taken from the arguments that are plain tensors",
                fix="call_for_per_sample_grads(module, batch_size=n)",
            )
