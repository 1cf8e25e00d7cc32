"""What a batch says of its samples: how many, their ids, labels and what the model predicts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import UsageError
from .store import Rows, Scratch, Texts

Pick = Callable[[Any], Any] | str | int
LABELS = ("labels", "label", "y", "target", "targets")


def expect_batches(batches: Any) -> Iterable[Any]:
    """Refuse a single batch given where an iterable of batches belongs."""
    tensors = isinstance(batches, tuple) and any(isinstance(b, Tensor) for b in batches)
    if isinstance(batches, (Tensor, Mapping, str)) or tensors:
        raise UsageError(
            f"inspect takes an iterable of batches, got one {type(batches).__name__}",
            why="a loop over it would not give batches",
            fix="pass a DataLoader, or a list with the batch in it: [batch]",
        )
    if not isinstance(batches, Iterable):
        raise UsageError(
            f"inspect takes an iterable of batches, got {type(batches).__name__}",
            fix="pass a DataLoader or a list of batches",
        )
    return batches


def moved(batch: Any, device: torch.device | str | None) -> Any:
    """The batch with all its tensors on a device."""
    if device is None:
        return batch
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def picked(pick: Pick, batch: Any, what: str) -> Any:
    """An entry of a batch by key, by position or by function."""
    try:
        return pick(batch) if callable(pick) else batch[pick]
    except (KeyError, IndexError, TypeError) as error:
        raise UsageError(
            f"{what}={pick!r} is not in the batch", why=f"{type(error).__name__}: {error}",
            fix="give a key or position of the batch, or a function of it",
        ) from error  # fmt: skip


def labels_of(batch: Any, pick: Pick | Literal[False] | None, n: int) -> Tensor | None:
    """Integer labels (n,): as told, or where batches usually have them."""
    if pick is False:
        return None
    if pick is not None:
        told = picked(pick, batch, "labels")
        found = told if isinstance(told, Tensor) else torch.as_tensor(told)
        if tuple(found.shape) != (n,) or found.is_floating_point() or found.is_complex():
            raise UsageError(
                f"labels have shape {tuple(found.shape)} and dtype {found.dtype}",
                why=f"one whole number for each of {n} samples is needed",
                fix="labels= a key, position or function of the batch; or leave it out",
            )
        return found.detach().long().cpu()
    usual: Any = None
    if isinstance(batch, Mapping):
        usual = next((batch[key] for key in LABELS if key in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
        usual = batch[1]
    if not isinstance(usual, Tensor) or usual.is_floating_point() or usual.is_complex():
        return None
    return usual.detach().long().cpu() if tuple(usual.shape) == (n,) else None


def predictions_of(output: Any, labels: Tensor | None, n: int) -> Tensor | None:
    """The class of the largest output, where the model's output looks like class scores."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    else:
        output = getattr(output, "logits", output)
    if labels is None or not isinstance(output, Tensor) or output.dim() != 2:
        return None
    if output.shape[0] != n or output.shape[1] < 2 or not output.is_floating_point():
        return None
    if labels.numel() and int(labels.max()) >= output.shape[1]:
        return None
    return output.detach().argmax(1).cpu()


class Ids:
    """The user's own names of the samples, or their positions."""

    def __init__(self, source: Pick | Iterable[Any] | None, scratch: Scratch) -> None:
        self._pick: Pick | None = None
        self._stream: Iterator[Any] | None = None
        if callable(source) or isinstance(source, (str, int)):
            self._pick = source
        elif source is not None:
            self._stream = iter(source)
        self.given = source is not None
        self.count = 0
        self._numbers, self._texts = Rows(scratch), Texts(scratch)
        self._kind: type | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int | str:
        if not self.given:
            return index
        if self._kind is int:
            return int(self._numbers.tensor()[index])
        return self._texts[index]

    def add(self, batch: Any, n: int) -> None:
        """Read the ids of one batch."""
        self.count += n
        if not self.given:
            return
        if self._stream is not None:
            found = list(itertools.islice(self._stream, n))
        else:
            assert self._pick is not None
            value = picked(self._pick, batch, "ids")
            found = value.tolist() if isinstance(value, Tensor) else list(value)
        if len(found) != n:
            raise UsageError(
                f"{len(found)} ids for a batch of {n} samples",
                fix="ids= one id per sample in order, or a key, position or function of the batch",
            )
        found = [value.item() if isinstance(value, Tensor) else value for value in found]
        whole = all(isinstance(v, int) and not isinstance(v, bool) for v in found)
        if self._kind is None:
            self._kind = int if whole else str
        if self._kind is int and not whole:
            raise UsageError("some ids are whole numbers and some are not", fix="give all as text")
        if self._kind is int:
            self._numbers.append(torch.tensor(found, dtype=torch.int64))
        else:
            self._texts.append([str(value) for value in found])
