"""Which samples have the same inputs, and which merely have nearly the same gradient."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from . import neighbours
from .contents import same

TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Group:
    """Samples by their ids, and whether their inputs are identical (None: not compared)."""

    ids: tuple[int | str, ...]
    identical: bool | None


class Likeness:
    """Groups of samples by their places: by fingerprints of their inputs, and by gradient."""

    def __init__(
        self,
        contents: Tensor | None,
        labels: Tensor | None,
        projections: Tensor,
        norms: Tensor,
        usable: Tensor,
    ) -> None:
        self._contents, self._labels = contents, labels
        self._gradients = (projections, norms, usable)

    @property
    def compared(self) -> bool:
        """Whether inputs could be compared."""
        return self._contents is not None

    @functools.cached_property
    def identical(self) -> list[list[int]]:
        """Groups of samples with identical inputs."""
        return [] if self._contents is None else same(self._contents)

    @functools.cached_property
    def conflicting(self) -> list[list[int]]:
        """Groups of identical inputs with different labels."""
        labels = self._labels
        if labels is None:
            return []
        return [group for group in self.identical if len(set(labels[group].tolist())) > 1]

    @functools.cached_property
    def alike(self) -> list[list[int]]:
        """Groups with nearly equal gradients whose inputs are not all identical."""
        return self.close(TOLERANCE)

    def close(self, tolerance: float) -> list[list[int]]:
        """The same for another tolerance."""
        found = neighbours.duplicates(*self._gradients, tolerance=tolerance)
        return [group for group in found if self.distinct(group) > 1]

    def distinct(self, group: list[int]) -> int:
        """How many different inputs a group has."""
        return len({self._first.get(i, i) for i in group})

    @functools.cached_property
    def _first(self) -> dict[int, int]:
        return {i: group[0] for group in self.identical for i in group}
