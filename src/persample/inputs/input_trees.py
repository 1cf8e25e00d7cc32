"""The arguments of a module's call: their names, and the tensors nested in them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import UsageError, describe, here
from .containers import attributes, entries


def argument_names(module: nn.Module) -> Sequence[str]:
    """The names of positional arguments; wrappers (DDP, compiled modules) pass theirs on."""
    method = getattr(module.forward, "__func__", None)
    # what a class defines may be remembered, what an instance was given may hold the model
    names = _method_names(method) if method is not None else _names(module.forward, 0)
    if names is None:
        inner = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
        return argument_names(inner) if isinstance(inner, nn.Module) else ()
    return names


def _names(function: Callable[..., Any], skipped: int) -> Sequence[str] | None:
    """The names of a function's positional arguments; None if it takes any."""
    try:
        found = list(inspect.signature(function).parameters.values())[skipped:]
    except (TypeError, ValueError):
        return ()
    several = inspect.Parameter.VAR_POSITIONAL
    if found and found[0].kind is several:
        return None
    return [p.name for p in found if p.kind is not several]


@functools.lru_cache(maxsize=1024)
def _method_names(method: Callable[..., Any]) -> Sequence[str] | None:
    return _names(method, 1)


def open_object(value: Any, *, callables: bool = False) -> Any:
    """The attributes of a batch that is an object of the caller's own class, or the value."""
    found = attributes(value, callables=callables)
    return value if found is None else found


def tensors_of(named: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The tensors nested in arguments, with their paths.

    An object that can be called is more often a function of the model's than a batch: it is looked
    into where nothing else holds tensors.
    """
    found: list[tuple[str, Any]] = []
    for callables in (False, True):
        for name, value in named if not found else ():
            if value.__class__ is Tensor:
                found.append((name, value))
            else:
                found += walk(name, open_object(value, callables=callables))
    return found


def tensor_of(value: Any) -> Any:
    """The tensor that holds the rows: of a packed sequence, its data."""
    return value.data if isinstance(value, PackedSequence) else value


def packed_ids(packed: PackedSequence) -> Tensor:
    """The sample of every row: rows run over time, then over slots."""
    device = packed.data.device
    slots = torch.cat(
        [torch.arange(int(size), device=device) for size in packed.batch_sizes]
        or [torch.zeros(0, dtype=torch.long, device=device)]
    )
    return slots if packed.sorted_indices is None else packed.sorted_indices[slots]


def walk(path: str, value: Any) -> list[tuple[str, Any]]:
    """The tensors (and packed sequences) in nested inputs, with their paths."""
    if isinstance(value, (Tensor, PackedSequence)):
        return [(path, value)]
    parts = entries(value) or ()
    return [leaf for key, item in parts for leaf in walk(f"{path}.{key}", item)]


def lists_alike(found: list[tuple[str, Any]], least: int = 2) -> list[list[Tensor]]:
    """Lists of several tensors that differ in their sizes at most; no lists of mere indices."""
    lists: dict[str, list[Tensor]] = {}
    for path, value in found:
        prefix, _, last = path.rpartition(".")
        if prefix and last.isdigit() and isinstance(value, Tensor):
            lists.setdefault(prefix, []).append(value)
    return [
        tensors
        for tensors in lists.values()
        if len(tensors) >= least
        and len({(t.dtype, t.dim()) for t in tensors}) == 1
        and (tensors[0].dim() > 1 or (tensors[0].dim() and tensors[0].is_floating_point()))
    ]


def nested_lists(found: list[tuple[str, Any]]) -> list[list[list[Tensor]]]:
    """Lists of lists of tensors that differ in their sizes at most: images of several sizes."""
    lists: dict[str, dict[int, list[Tensor]]] = {}
    for path, value in found:
        *before, outer, inner = ["", *path.split(".")][-3:]
        if outer.isdigit() and inner.isdigit() and isinstance(value, Tensor):
            prefix = path.rpartition(".")[0].rpartition(".")[0]
            lists.setdefault(prefix or before[0], {}).setdefault(int(outer), []).append(value)
    return [
        list(groups.values())
        for groups in lists.values()
        if len({(t.dtype, t.dim()) for group in groups.values() for t in group}) == 1
        and next(iter(groups.values()))[0].dim() > 1
    ]


def in_nested_lists(nested: list[list[list[Tensor]]], n: int | None) -> dict[int, Tensor]:
    """The sample of each tensor, by its id: a list each, or a tensor each, if there are n of them.

    Lists of n tensors each are several lists of samples.
    """
    found: dict[int, Tensor] = {}
    for groups in nested:
        if all(len(group) == n for group in groups):
            continue
        whole = groups if len(groups) == n else [[t] for group in groups for t in group]
        for k, group in enumerate(whole if len(whole) == n else []):
            for tensor in group:
                _give(found, tensor, k)
    return found


def _give(found: dict[int, Tensor], tensor: Tensor, k: int) -> None:
    """A tensor is one sample's: the same one cannot stand for another, too."""
    colour = torch.full((1,) * tensor.dim(), k, device=tensor.device)
    known = found.setdefault(id(tensor), colour)
    if not torch.equal(known, colour):
        raise UsageError(
            f"a list holds the same tensor as sample {int(known)} and as sample {k}",
            where=describe(here()),
            why="tensors are told apart by identity: both would count for one sample",
            fix="pass copies: [x.clone() for x in samples]",
        )


def differ_in_rows(tensors: list[Tensor]) -> bool:
    """Whether only the numbers of rows differ: nothing but samples is like that."""
    rows, rest = {t.shape[:1] for t in tensors}, {t.shape[1:] for t in tensors}
    return len(rows) > 1 and len(rest) == 1


def one_each(
    lists: list[list[Tensor]], values: list[Any], n: int | None, dim: int, *, batched: bool
) -> dict[int, Tensor]:
    """The colour of each tensor, by its id, in lists of n that do not hold n rows each.

    Where another input holds n rows, or is known to hold samples (``batched``), a list of equal
    tensors is something else: the two states of an LSTM beside two samples.
    """
    listed = {id(t) for tensors in lists for t in tensors}
    batched = batched or any(
        isinstance(v, Tensor) and id(v) not in listed and v.dim() > dim and v.shape[dim] == n
        for v in values
    )
    found: dict[int, Tensor] = {}
    for tensors in lists:
        rows = [t.shape[dim] if t.dim() > dim else 1 for t in tensors]
        if batched and not differ_in_rows(tensors):
            continue
        if len(tensors) == n and any(row != n for row in rows):
            for k, tensor in enumerate(tensors):
                _give(found, tensor, k)
    return found
