"""The report: what an inspection found, to be printed, saved and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .compare import Comparison, Snapshot, compare, load
from .findings import Findings
from .page import page
from .saving import csv_text, json_text, write
from .summary import summary


class Report(Findings):
    """What :func:`persample.inspect` returns.

    Tensors, one row per sample in the order of the data: ``losses``, ``norms``, ``labels`` and
    ``predictions`` (or None), ``parameter_norms`` (N, parameters), ``projections`` (N, width),
    ``finite``, and from them ``suspicion.score``. ``ids[i]`` is the i-th sample's own id.
    """

    def compare(self, other: Report | Snapshot | str | Path) -> Comparison:
        """What changed since another report, or one saved with :meth:`to_json`."""
        if isinstance(other, (str, Path)):
            other = load(other)
        return compare(other.snapshot() if isinstance(other, Report) else other, self.snapshot())

    def to_json(self, path: str | Path) -> Path:
        """Everything but projections and pictures; ``--against`` and :meth:`compare` read it."""
        return write(path, json_text(self))

    def to_csv(self, path: str | Path) -> Path:
        """One row per sample; names of classes beside their numbers."""
        return write(path, csv_text(self.named()))

    def to_html(self, path: str | Path, *, against: Any = None, k: int = 24) -> Path:
        """One self-contained page; ``against`` an earlier report or its JSON file."""
        return write(path, [page(self, None if against is None else self.compare(against), k=k)])

    def __str__(self) -> str:
        return summary(self)
