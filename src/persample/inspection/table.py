"""Columns of equal length with a plain-text form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

Column = Tensor | Sequence[Any]


class Table:
    """``table["norm"]`` is a column, ``len(table)`` the number of rows, ``str(table)`` text."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dictionary of plain Python values per row."""
        for i in range(len(self)):
            yield {name: plain(column[i]) for name, column in self.columns.items()}

    def text(self, limit: int | None = 20) -> str:
        """Aligned columns; numbers to the right."""
        shown = list(self.rows()) if limit is None or len(self) <= limit else None
        rest = 0
        if shown is None:
            assert limit is not None
            shown = list(itertools.islice(self.rows(), limit))
            rest = len(self) - limit
        cells = [[written(row[name]) for name in self.columns] for row in shown]
        lines = aligned([list(self.columns), *cells])
        return "\n".join(lines + ([f"… and {rest:,} more"] if rest else []))

    __str__ = text


def plain(value: Any) -> Any:
    """A Python value."""
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def written(value: Any) -> str:
    """A value as it is read best."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return number(value)
    return str(value)


def number(value: float) -> str:
    """Three significant digits."""
    if not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of columns; a column of numbers is set to the right."""
    if not rows or not rows[0]:
        return []
    count = len(rows[0])
    widths = [max(len(row[k]) for row in rows) for k in range(count)]
    right = [all(_numeric(row[k]) for row in rows[1:]) for k in range(count)]
    return [
        "  ".join(
            row[k].rjust(widths[k]) if right[k] else row[k].ljust(widths[k]) for k in range(count)
        ).rstrip()
        for row in rows
    ]


def _numeric(text: str) -> bool:
    return not text or text.replace(",", "").lstrip("+-±")[:1].isdigit() or text in ("nan", "inf")
