"""Data: read once how they are indexed, then load the rows of micro-batches."""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset
from torch.utils.data import default_collate as default

from ..errors import UsageError
from ..validation import shown, whole

Collate = Callable[[list[Any]], Any]
_WHOLE = 64 << 20  # bytes of a tensor that a fingerprint reads
_WAYS = "a Dataset with len() and [index], a tensor, or a tuple or dictionary of tensors"


class Source:
    """The data set as ``rows -> batch``.

    Args:
        data: A map-style Dataset, a tensor, a tuple or dictionary of tensors with the samples on
            axis 0, or a DataLoader that does not shuffle (its data set and collate are used).
        collate: Makes a batch of a list of samples.
        num_workers: Processes that load rows ahead.
    """

    def __init__(self, data: Any, *, collate: Collate | None, num_workers: int) -> None:
        if isinstance(data, DataLoader):
            expect_order(data)
            collate = collate or data.collate_fn
            data = data.dataset
        if isinstance(data, TensorDataset) and collate in (None, default):
            data, collate = data.tensors, None
        self.columns = _columns(data)
        if self.columns is None:
            _expect_dataset(data)
        self.data, self._collate = data, collate
        self.num_workers = whole(num_workers, "num_workers", least=0)

    def __len__(self) -> int:
        return len(self.data) if self.columns is None else len(self.columns[0])

    def load(self, rows: Tensor) -> Any:
        """One micro-batch."""
        if self.columns is not None and self._collate is None:
            return _indexed(self.data, rows)
        return (self._collate or default)(self._items(rows.tolist()))

    def _items(self, rows: list[int]) -> list[Any]:
        if self.columns is not None:
            return [_indexed(self.data, row) for row in rows]
        if hasattr(self.data, "__getitems__"):
            return list(self.data.__getitems__(rows))
        return [self.data[row] for row in rows]

    def each(self, jobs: Iterable[tuple[Tensor, int]]) -> Iterator[Any]:
        """The micro-batches of many (rows, seed), in order.

        Workers load ahead, with generators that the seed decides: what they draw does not depend on
        which of them is asked, or on when training was resumed.
        """
        if not self.num_workers:
            return (self.load(rows) for rows, _ in jobs)
        loader: DataLoader[Any] = DataLoader(
            _Jobs(self), batch_size=None, sampler=_Once(jobs), num_workers=self.num_workers,
            collate_fn=_same, generator=torch.Generator(),
        )  # fmt: skip
        return iter(loader)

    def fingerprint(self) -> str:
        """A digest: of tensors their content, of another data set its kind and number."""
        digest = hashlib.sha256(f"{type(self.data).__name__} {len(self)}".encode())
        for column in self.columns or ():
            digest.update(f"{tuple(column.shape)} {column.dtype}".encode())
            size = column.numel() * column.element_size()
            rows = column[:: max(1, -(-size // _WHOLE))].detach().cpu().contiguous()
            digest.update(_bytes(rows))
        return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, without NumPy."""
    size = tensor.numel() * tensor.element_size()
    kind = ctypes.c_ubyte * size
    return memoryview(kind.from_address(tensor.data_ptr()) if size else kind())


class _Jobs(torch.utils.data.Dataset[Any]):
    """A data set whose indices are (rows, seed) and whose items are micro-batches."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, job: tuple[Tensor, int]) -> Any:
        rows, seed = job
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % (1 << 32))
        return self._source.load(rows)


class _Once(torch.utils.data.Sampler[Any]):
    """Hands jobs out one after the other."""

    def __init__(self, jobs: Iterable[Any]) -> None:
        self._jobs = jobs

    def __iter__(self) -> Iterator[Any]:
        return iter(self._jobs)


def _same(batch: Any) -> Any:
    return batch


def placed(batch: Any, device: torch.device) -> Any:
    """The batch on the model's device."""
    if device.type == "cpu":
        return batch
    if hasattr(batch, "to"):  # tensors, and batches of Hugging Face
        return batch.to(device)
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def expect_order(loader: DataLoader[Any]) -> None:
    """Refuse a loader that draws samples itself: its order is not that of the accountant."""
    plain = isinstance(loader.sampler, SequentialSampler) and loader.batch_size is not None
    if not plain or isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "data is a DataLoader that shuffles, or draws samples in a way of its own",
            why="the guarantee needs Poisson sampling: an independent coin for every record",
            fix="pass the data set: Training(model, optimizer, loader.dataset, plan)",
        )


def _columns(data: Any) -> list[Tensor] | None:
    if isinstance(data, Tensor):
        found: list[Any] = [data]
    elif isinstance(data, (tuple, Mapping)):
        found = list(data.values() if isinstance(data, Mapping) else data)
        if not found or not all(isinstance(column, Tensor) for column in found):
            kinds = ", ".join(sorted({type(column).__name__ for column in found})) or "nothing"
            raise UsageError(
                f"data must be {_WAYS}; got a {type(data).__name__} of {kinds}",
                fix="data=(torch.as_tensor(x), torch.as_tensor(y)), or a list of samples",
            )
    else:
        return None
    sizes = {len(column) if column.dim() else -1 for column in found}
    if len(sizes) != 1 or -1 in sizes:
        raise UsageError(
            f"the tensors of data have {', '.join(map(shown, (tuple(c.shape) for c in found)))}",
            why="axis 0 must hold the samples, the same number in each",
            fix="data=(x, y) with len(x) == len(y)",
        )
    return found


def _expect_dataset(data: Any) -> None:
    sized = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, (str, bytes, IterableDataset)) or not sized:
        raise UsageError(
            f"data must be {_WAYS}; got {type(data).__name__}",
            why="Poisson sampling throws a coin for every index",
            fix="a torch.utils.data.Dataset with __len__ and __getitem__",
        )


def _indexed(data: Any, rows: Any) -> Any:
    if isinstance(data, Tensor):
        return data[rows.to(data.device) if isinstance(rows, Tensor) else rows]
    if isinstance(data, Mapping):
        return {name: _indexed(column, rows) for name, column in data.items()}
    columns = [_indexed(column, rows) for column in data]
    return type(data)(*columns) if hasattr(data, "_fields") else tuple(columns)
