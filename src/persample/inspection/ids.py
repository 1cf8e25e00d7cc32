"""The names of samples: the user's own, or their place in the data or in the pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..inputs.batch_samples import Pick, picked
from .order import Order
from .store import Rows, Scratch, Texts

CARRIED = 'ids="idx" (a key or attribute of the batch), ids=2 (its position), or a function of it'


class Ids:
    """One name per sample, in the order in which samples come.

    Names given in order belong to samples that come in order: with a loader that may shuffle they
    are refused. Without any, a sample is called by its number: "pass-7" where it only tells the
    place in this pass, 7 where it is the place in the data.
    """

    def __init__(self, source: Pick | Iterable[Any] | None, scratch: Scratch, order: Order) -> None:
        self._pick: Pick | None = None
        self._stream: Iterator[Any] | None = None
        if callable(source) or isinstance(source, (str, int)):
            self._pick = source
        elif source is not None:
            _expect_order(order)
            self._stream = iter(source)
        self.given, self.order = source is not None, order
        self.available = len(source) if self._stream and isinstance(source, Sized) else None
        self.count = 0
        self._numbers, self._texts = Rows(scratch), Texts(scratch)
        self._kind: type | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int | str:
        if not self.given:
            return index if self.order.of_data else f"pass-{index}"
        if self._kind is int:
            return int(self._numbers.tensor()[index])
        return self._texts[index]

    def carried(self, batch: Any) -> Any:
        """The name or the tensor by which a batch carries the ids, None if it does not."""
        if isinstance(self._pick, str) or self._pick is None:
            return self._pick
        return picked(self._pick, batch, "ids")

    def add(self, batch: Any, n: int) -> None:
        """Read the ids of one batch."""
        self.count += n
        if not self.given:
            return
        found = [_plain(value) for value in self._read(batch, n)]
        if len(found) != n:
            raise UsageError(
                f"{len(found)} ids for a batch of {n} samples",
                fix=f"one id per sample: in order, or {CARRIED}",
            )
        whole = all(isinstance(v, int) and not isinstance(v, bool) for v in found)
        if self._kind is None:
            self._kind = int if whole else str
        if self._kind is int and not whole:
            raise UsageError("some ids are whole numbers and some are not", fix="give all as text")
        if self._kind is int:
            self._numbers.append(torch.tensor(found, dtype=torch.int64))
        else:
            self._texts.append([str(value) for value in found])

    def _read(self, batch: Any, n: int) -> list[Any]:
        if self._stream is not None:
            return list(itertools.islice(self._stream, n))
        assert self._pick is not None
        value = picked(self._pick, batch, "ids")
        if isinstance(value, Tensor):
            return value.tolist() if value.dim() == 1 else list(value)
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise UsageError(
                f"ids={self._pick!r} gives {type(value).__name__} for a batch of {n} samples",
                fix="the batch must carry one id per sample, in a list or a tensor",
            )
        return list(value)


def _expect_order(order: Order) -> None:
    if order.why:
        raise UsageError(
            "ids in a fixed order cannot be paired with samples of a loader that may reorder them",
            why=order.why,
            fix=f"let the batch carry its ids: {CARRIED}; or DataLoader(..., shuffle=False) "
            "without a sampler or collate_fn",
        )


def _plain(value: Any) -> Any:
    """A Python value of a tensor's or an array's element."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
