"""Whether samples come in the order of their data set: only then does a running number name one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    default_collate,
    default_convert,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

WRAPPED = ("iterable", "dataloader", "base_dataloader", "loader")  # progress bars and the like


@dataclass(frozen=True, slots=True)
class Order:
    """Whether the order is that of the data, and what is in the way if a loader's is not."""

    of_data: bool
    why: str = ""


def order_of(batches: Any) -> Order:
    """A list of batches has the order its maker gave it; a loader must prove that it keeps one.

    Any other iterable (a generator) has the order of this pass, and ids given in order are the
    caller's word.
    """
    if isinstance(batches, _BaseDataLoaderIter):
        return Order(False, "an iterator of a DataLoader does not tell its order")
    loader = _loader(batches)
    if loader is not None:
        why = _obstacle(loader)
        return Order(not why and loader is batches, why)
    return Order(isinstance(batches, Sequence))


def _loader(batches: Any) -> DataLoader[Any] | None:
    for found in (batches, *(getattr(batches, name, None) for name in WRAPPED)):
        if isinstance(found, DataLoader):
            return found
    return None


def _obstacle(loader: DataLoader[Any]) -> str:
    """Why the k-th sample of a loader need not be the k-th of its data set; nothing if it is."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} has an iteration of its own"
    if isinstance(loader.dataset, IterableDataset):
        workers = f", which {loader.num_workers} workers share" if loader.num_workers > 1 else ""
        return f"{type(loader.dataset).__name__} is an IterableDataset{workers}"
    if not getattr(loader, "in_order", True):
        return "the loader has in_order=False"
    batched, sampler = loader.batch_sampler, loader.sampler
    if batched is not None:
        if type(batched) is not BatchSampler:
            return f"the loader draws batches by {type(batched).__name__}"
        sampler = batched.sampler
    if type(sampler) is not SequentialSampler:
        return f"the loader draws samples by {type(sampler).__name__}"
    if loader.collate_fn not in (default_collate, default_convert):
        name = getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__)
        return f"the loader's collate_fn {name} may put samples in another order"
    return ""
