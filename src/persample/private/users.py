"""Which samples belong to which unit: to themselves, or to a user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import UsageError
from ..validation import shown, whole
from .keys import stream


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch: its rows of the data, and the units that they belong to.

    Attributes:
        rows: Indices of the data, in the order in which they are loaded.
        units: Indices of the units, each once.
        ids: The place in ``units`` of each row, or None where every row is a unit.
        number: The place of this part in its batch.
        idle: It is run to keep step with other processes; what it gives is thrown away.
        padding: How many rows at the end only fill it up, and count for nothing.
    """

    rows: Tensor
    units: Tensor
    ids: Tensor | None = None
    number: int = 0
    idle: bool = False
    padding: int = 0

    @property
    def n(self) -> int:
        """The number of samples in a recording of it: units, and rows that fill it up."""
        if self.ids is None:
            return len(self.rows)
        return len(self.units) + (1 if self.padding else 0)

    def weights(self) -> Tensor | None:
        """One for each unit, zero for padding; None without any."""
        if not self.padding:
            return None
        return (torch.arange(self.n) < len(self.units)).double()

    def padded(self, rows: int) -> Part:
        """Filled up to a number of rows by copies of its first."""
        missing = rows - len(self.rows)
        if missing <= 0:
            return self
        filled = torch.cat([self.rows, self.rows[:1].expand(missing)])
        ids = self.ids
        if ids is not None:  # they are nobody's
            ids = torch.cat([ids, torch.full((missing,), len(self.units))])
        return Part(filled, self.units, ids, self.number, self.idle, missing)

    def first(self) -> Part:
        """Its first unit alone, idle."""
        mine = slice(0, 1) if self.ids is None else self.ids == 0
        ids = None if self.ids is None else self.ids[mine]
        return Part(self.rows[mine], self.units[:1], ids, self.number, idle=True)


class Units(Protocol):
    """How drawn units become micro-batches."""

    @property
    def size(self) -> int:
        """The number of units that coins are thrown for."""

    def parts(self, step: int, drawn: Tensor) -> list[Part]:
        """The micro-batches of a step."""


class Samples:
    """Every sample is a unit of its own."""

    def __init__(self, size: int, micro_batch: int) -> None:
        self.size, self._micro_batch = size, micro_batch

    def parts(self, step: int, drawn: Tensor) -> list[Part]:
        """Parts of ``micro_batch`` rows; the last may be smaller."""
        if not len(drawn):
            return []
        pieces = drawn.split(self._micro_batch)
        return [Part(rows, rows, None, k) for k, rows in enumerate(pieces)]


class Users:
    """A unit is a user with all their samples; micro-batches end between users.

    Args:
        owners: One user per sample: any labels. Whole numbers below ``size`` are indices of users;
            other labels are numbered in their sorted order.
        count: The number of samples.
        size: The public number of users, or None.
        micro_batch: The largest number of rows in a part.
        per_user: The largest number of samples that a user takes part with in a step: a uniform
            draw that depends on that user alone.
        secret: The key of those draws.
    """

    def __init__(
        self,
        owners: Any,
        *,
        count: int,
        size: int | None,
        micro_batch: int,
        per_user: int | None,
        secret: bytes,
    ) -> None:
        found, known = numbered(owners, count, size)
        self.size = known
        self._micro_batch, self._secret = micro_batch, secret
        self._per_user = None if per_user is None else whole(per_user, "per_user", least=1)
        self._order = found.argsort(stable=True)
        self._ends = torch.bincount(found, minlength=known).cumsum(0)
        self.owners = found
        self._expect_room()

    def _expect_room(self) -> None:
        most = self._micro_batch
        if self._per_user is not None:
            if self._per_user <= most:
                return
            raise UsageError(
                f"per_user={self._per_user} is more than micro_batch={most}",
                why="all samples of a user must be in one micro-batch to be clipped together",
                fix=f"per_user={most}, or a larger micro_batch",
            )
        # said before training, of the whole data set: it does not tell who was drawn
        if int(torch.bincount(self.owners, minlength=1).max()) > most:
            raise UsageError(
                f"a user has more samples than micro_batch={most}",
                why="all samples of a user must be in one micro-batch to be clipped together",
                fix=f"per_user={most} takes a uniform draw of each user's samples in every step",
            )

    def rows(self, step: int, user: int) -> Tensor:
        """A user's samples in a step."""
        start = int(self._ends[user - 1]) if user else 0
        mine = self._order[start : int(self._ends[user])]
        if self._per_user is None or len(mine) <= self._per_user:
            return mine
        keys = stream(self._secret, "per user", step, user, count=len(mine))
        return mine[keys.argsort()[: self._per_user].sort().values]

    def parts(self, step: int, drawn: Tensor) -> list[Part]:
        """Whole users, as many as have room."""
        found: list[Part] = []
        for users, rows in self._packed(step, drawn):
            ids = torch.arange(len(users)).repeat_interleave(torch.tensor([len(r) for r in rows]))
            found.append(Part(torch.cat(rows), torch.tensor(users), ids, len(found)))
        return found

    def _packed(self, step: int, drawn: Tensor) -> Iterator[tuple[list[int], list[Tensor]]]:
        users: list[int] = []
        rows: list[Tensor] = []
        filled = 0
        for user in drawn.tolist():
            mine = self.rows(step, user)
            if not len(mine):
                continue
            if filled + len(mine) > self._micro_batch:
                yield users, rows
                users, rows, filled = [], [], 0
            users.append(user)
            rows.append(mine)
            filled += len(mine)
        if users:
            yield users, rows


def numbered(owners: Any, count: int, size: int | None) -> tuple[Tensor, int]:
    """The index of each sample's user, and the number of users."""
    given = _listed(owners)
    if len(given) != count:
        raise UsageError(
            f"users has {len(given)} entries for {count} samples",
            fix="users= one label per sample, in the order of the data",
        )
    whole_numbers = all(isinstance(u, int) and not isinstance(u, bool) for u in given)
    if whole_numbers and size is not None and all(0 <= u < size for u in given):
        return torch.tensor(given, dtype=torch.int64), size
    try:
        labels = sorted(set(given))
    except TypeError as error:
        raise UsageError(
            f"users must be labels of one kind that can be sorted, got {shown(given[:3])}",
            fix="users=[str(user) for user in users]",
        ) from error
    if size is not None and len(labels) > size:
        raise UsageError(
            f"the plan is for {size} users, but the data have {len(labels)}",
            fix="private.plan(unit='user', size=number of users)",
        )
    places = {label: k for k, label in enumerate(labels)}
    known = len(labels) if size is None else size
    return torch.tensor([places[u] for u in given], dtype=torch.int64), known


def _listed(owners: Any) -> Sequence[Any]:
    if isinstance(owners, Tensor):
        if owners.dim() == 1 and not owners.is_floating_point() and not owners.is_complex():
            return list(owners.tolist())
    elif hasattr(owners, "tolist"):  # NumPy, pandas
        return list(owners.tolist())
    elif isinstance(owners, Iterable) and not isinstance(owners, (str, bytes)):
        return list(owners)
    raise UsageError(
        f"users must be one label per sample, got {shown(owners)}",
        fix="a list, or a tensor of whole numbers: users=torch.tensor([0, 0, 1])",
    )
