"""The samples of a batch of any kind: how many, some of them, an entry, the same on a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from ..errors import UsageError
from .containers import attributes, entries, leaves, mapped
from .input_trees import differ_in_rows

Pick = Callable[[Any], Any] | str | int
OPTIONS = ("n", "sample_ids")  # of record, that may be read off every batch


def tensors(batch: Any) -> list[Tensor]:
    """All tensors of a batch but those of packed sequences."""
    return [
        leaf for leaf in leaves(batch, whole=_is_packed, objects=True) if isinstance(leaf, Tensor)
    ]


def one_batch(data: Any) -> bool:
    """Whether data are one batch, not an iterable of batches; a list may be either and is not."""
    if isinstance(data, (Tensor, Mapping)) or dataclasses.is_dataclass(data) or holds_graphs(data):
        return True
    if isinstance(data, tuple):
        return any(isinstance(part, Tensor) for part in data)
    loops = isinstance(data, Iterable) or hasattr(data, "__getitem__")
    return not loops and bool(tensors(data))


def batch_size(batch: Any, dim: int = 0) -> int:
    """The number of graphs or sequences, or axis ``dim`` of the first tensor in the batch."""
    for leaf in leaves(batch, whole=lambda v: _is_packed(v) or holds_graphs(v), objects=True):
        if not isinstance(leaf, Tensor):
            return _count(leaf)
        if leaf.dim() > dim:
            return leaf.shape[dim]
    raise UsageError(
        f"the batch holds no tensor with samples: {described(batch)}",
        fix="a batch is a tensor, or tensors in tuples, lists, mappings, dataclasses or objects",
    )


def take(batch: Any, index: Tensor, n: int, dim: int = 0) -> Any:
    """The batch restricted to some samples: every tensor with n indices on ``dim``.

    Lists of n texts or of n ragged tensors, packed sequences and batches of n graphs go with it.
    """
    places = index.tolist()

    def chosen(part: Any) -> Any:
        if isinstance(part, Tensor):
            if part.dim() <= dim or part.shape[dim] != n:
                return part
            taken = part.index_select(dim, index.to(part.device))
            # data by which a program takes gradients are data again
            return taken.detach().requires_grad_() if part.is_leaf and part.requires_grad else taken
        if _count(part) != n:
            return part
        if _is_packed(part):
            rows = unpack_sequence(part)
            return pack_sequence([rows[i] for i in places], enforce_sorted=False)
        if holds_graphs(part):
            graphs = part.to_data_list()
            made: Any = next(kind for kind in type(part).__mro__ if "from_data_list" in vars(kind))
            return made.from_data_list([graphs[i] for i in places])
        # a tensor stands for one sample: one that is taken twice must be two
        items = [part[i] for i in places]
        return type(part)(t.clone() if isinstance(t, Tensor) else t for t in items)

    def whole(part: Any) -> bool:
        if _is_packed(part) or _is_texts(part) or holds_graphs(part):
            return True
        return part is not batch and _is_ragged(part, n, dim)

    return mapped(batch, chosen, whole=whole, objects=True)


def moved(batch: Any, device: torch.device | str | None) -> Any:
    """The batch with all its tensors on a device; the caller's own stays where it is."""
    if device is None:
        return batch

    def whole(part: Any) -> bool:  # packed sequences, and objects that cannot be opened
        return _is_packed(part) or (callable(getattr(part, "to", None)) and _is_sealed(part))

    def there(part: Any) -> Any:  # some move themselves, and not a copy
        return (copy.copy(part) if whole(part) else part).to(device)

    return mapped(batch, there, whole=whole, objects=True)


def picked(pick: Pick, batch: Any, what: str) -> Any:
    """An entry of a batch: by key or attribute, by position, or by function."""
    if callable(pick):
        return pick(batch)
    try:
        if isinstance(batch, Mapping) or not isinstance(pick, str):
            return batch[pick]
        return getattr(batch, pick)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise UsageError(
            f"{what}={pick!r} is not in the batch", why=f"the batch is {described(batch)}",
            fix="give a key, attribute or position of the batch, or a function of it",
        ) from error  # fmt: skip


def resolved(options: Mapping[str, Any], batch: Any) -> dict[str, Any]:
    """Options of ``record`` for one batch: ``n`` and ``sample_ids`` may be read off the batch."""
    found = dict(options)
    for name in OPTIONS:
        if callable(found.get(name)) or isinstance(found.get(name), str):
            found[name] = picked(found[name], batch, name)
    return found


def following(options: Mapping[str, Any], batch: Any) -> dict[str, Any]:
    """The options with ``sample_ids`` that lie in the batch read off whatever batch is run."""
    found, ids = dict(options), options.get("sample_ids")
    if isinstance(ids, Tensor):
        place = next((k for k, tensor in enumerate(tensors(batch)) if tensor is ids), None)
        if place is not None:
            found["sample_ids"] = lambda which: tensors(which)[place]
    return found


def described(batch: Any) -> str:
    """What a batch is made of, in a few words."""
    parts = entries(batch)
    if parts is None:
        parts = (attributes(batch, callables=True) or {}).items()
    keys = [str(key) for key, _ in parts]
    kind = type(batch).__name__
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        kinds = [type(part).__name__ for part in batch]
        return f"a {kind} of {', '.join(kinds[:6])}{' …' if len(kinds) > 6 else ''}"
    if not keys:
        return f"a {kind}"
    return f"a {kind} with {', '.join(keys[:8])}{' …' if len(keys) > 8 else ''}"


def _count(part: Any) -> int:
    """The samples of what is no tensor: a packed sequence, a batch of graphs, a list of texts."""
    if _is_packed(part):
        return int(part.batch_sizes[0]) if len(part.batch_sizes) else 0
    return int(part.num_graphs) if holds_graphs(part) else len(part)


def _is_packed(part: Any) -> bool:
    return isinstance(part, PackedSequence)


def _is_texts(part: Any) -> bool:
    listed = type(part) in (list, tuple) and bool(part)
    return listed and all(isinstance(text, str) for text in part)


def _is_ragged(part: Any, n: int, dim: int) -> bool:
    """One tensor for each of n samples: only their numbers of rows differ, or none has n rows."""
    if type(part) not in (list, tuple) or len(part) != n:
        return False
    if not all(isinstance(tensor, Tensor) for tensor in part):
        return False
    alike = type(part) is list and len({(t.dtype, t.dim()) for t in part}) == 1
    held = any(tensor.dim() > dim and tensor.shape[dim] == n for tensor in part)
    return differ_in_rows(part) or (alike and not held)


def holds_graphs(part: Any) -> bool:
    """A batch of graphs as PyTorch Geometric makes them, which can split itself."""
    kind = type(part)
    return hasattr(kind, "to_data_list") and hasattr(kind, "from_data_list")


def _is_sealed(part: Any) -> bool:
    closed = entries(part) is None and attributes(part, callables=True) is None
    return closed and not isinstance(part, (Tensor, nn.Module, type))
