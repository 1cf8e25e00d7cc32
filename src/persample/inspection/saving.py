"""Files that are written whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import StorageError
from .findings import Findings
from .table import Table, plain

FORMAT = 2
INPUTS = {True: "identical", False: "different", None: "not compared"}


def write(path: str | Path, parts: Iterable[str]) -> Path:
    """Write to a neighbour of the file and rename it: no half-written file is ever seen."""
    path = Path(path)
    temporary: str | None = None
    try:
        if path.exists() and not path.is_file():  # a pipe or a device cannot be renamed over
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(parts)
            return path
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(handle, "w", encoding="utf-8") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise StorageError(
            f"{path.name} was not written: {error.strerror or error}",
            where=str(path),
            why="the file is written beside its place and renamed when it is whole",
            fix="free some space, or choose another directory",
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def json_text(report: Findings) -> Iterator[str]:
    """The report column by column, so that a large one is not held as one string."""
    head = json.dumps(_clean(facts(report)), ensure_ascii=False, indent=1)
    yield head.rstrip()[:-1].rstrip() + ',\n "samples": {'
    comma = ""
    for name, column in report.table().columns.items():
        values = column.tolist() if isinstance(column, Tensor) else list(column)
        yield f"{comma}\n  {json.dumps(name)}: {json.dumps(_clean(values), ensure_ascii=False)}"
        comma = ","
    yield "\n }\n}\n"


def facts(report: Findings) -> dict[str, Any]:
    """All that is not one row per sample."""
    made, noise, curve = report.collected, report.noise, report.clip_curve
    check = report.verification
    return {
        "format": FORMAT,
        "model": report.model_name,
        "count": report.count,
        "batches": report.batches,
        "interrupted": report.interrupted,
        "dropout active": made.dropout,
        "ids given": report.ids_given,
        "samples in the order of the data": report.in_order,
        "classes": _classes(report),
        "verified": None if check is None else check.ok,
        "not verified because": made.unverified,
        "cost": {
            "ratio to a plain step": report.cost.ratio,
            "seconds": {**report.cost.seconds, "total": report.cost.total},
        },
        "nonfinite": [report.ids[i] for i in report.nonfinite.tolist()],
        "duplicates": [
            {"ids": list(group.ids), "inputs": INPUTS[group.identical]}
            for group in report.duplicates()
        ],
        "without gradient": report.without_gradient,
        "noise scale": None
        if noise is None
        else {key: getattr(noise, key) for key in noise.__slots__},
        "clip curve, computed from data, not private": {
            "threshold": curve.thresholds.tolist(),
            "clipped": curve.clipped.tolist(),
            "bias": curve.bias.tolist(),
        },
        "parameters": [
            {"name": p.name, "shape": p.shape, "quantiles": p.quantiles.tolist(), "share": p.share}
            for p in report.parameters
        ],
    }


def _classes(report: Findings) -> dict[str, str] | None:
    """The name of every class that occurs, by its number, if names were given."""
    if report.collected.gallery.show.classes is None:
        return None
    columns = (report.labels, report.predictions, report.suspicion.vote)
    numbers = {int(v) for column in columns if column is not None for v in column.unique()}
    return {str(number): report.class_name(number) for number in sorted(numbers)}


def csv_text(table: Table) -> Iterator[str]:
    """A header and one line per row."""
    line = io.StringIO()
    writer = csv.writer(line, lineterminator="\n")
    writer.writerow(table.columns)
    for i in range(len(table)):
        writer.writerow([plain(column[i]) for column in table.columns.values()])
        if i % 256 == 255:
            yield line.getvalue()
            line.seek(0)
            line.truncate()
    yield line.getvalue()


def _clean(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value
