"""Labels that the user changed on purpose: how many of them a ranking finds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UsageError


@dataclass(frozen=True, slots=True)
class Planted:
    """Positions of the changed samples, and how many of them two rankings put on top.

    With k changed samples, ``found`` are among the k most suspicious and ``found_by_loss`` among
    the k largest losses.
    """

    positions: frozenset[int]
    found: int
    found_by_loss: int

    @property
    def head(self) -> str:
        """The result in one line."""
        return (
            f"{self.found:,} of the {len(self.positions):,} planted wrong labels found; ranking by "
            f"loss finds {self.found_by_loss:,}"
        )

    @property
    def text(self) -> str:
        """How it is counted."""
        k = f"{len(self.positions):,}"
        return f"counted among the {k} most suspicious samples and among the {k} largest losses"


def count_planted(
    ids: Sequence[int | str], planted: Iterable[int | str], score: Tensor, losses: Tensor
) -> Planted:
    """Match ``planted`` with the samples' ids and count those at the top of both rankings."""
    where = {key: i for i, key in enumerate(ids)}
    wanted = list(planted)
    unknown = [key for key in wanted if key not in where]
    if unknown:
        raise UsageError(
            f"{len(unknown):,} of the {len(wanted):,} planted ids are not in this report, for "
            f"example {unknown[0]!r}",
            why="ids are matched exactly, text as text and numbers as numbers",
            fix="pass ids as in report.ids",
        )
    positions = frozenset(where[key] for key in wanted)

    def among(values: Tensor) -> int:
        usable = torch.nan_to_num(values, nan=-1.0)
        return len(positions & set(usable.topk(len(positions)).indices.tolist()))

    return Planted(positions, among(score), among(losses))
