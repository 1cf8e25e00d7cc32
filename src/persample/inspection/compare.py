"""What changed between two inspections, sample by sample through their ids."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .scores import STRONG, rank
from .table import Table, aligned, number, written

Id = int | str


BY_POSITION = (
    "Samples were matched by their position, because no ids were given: if the order of the data "
    "changed, this compares different samples."
)
UNMATCHED = (
    "Samples cannot be matched: no ids were given, and they came in the order of one pass. Pass "
    "ids= a field of the batch."
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The part of a report that is compared."""

    ids: list[Id]
    ids_given: bool
    losses: Tensor
    norms: Tensor
    suspicion: Tensor
    labels: Tensor | None
    predictions: Tensor | None
    parameters: dict[str, float] = field(default_factory=dict)
    noise: float | None = None
    model: str = ""
    in_order: bool = True


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of two inspections. ``movers`` are the samples whose suspicion changed most.

    Where one of them has no ids and samples came in the order of its pass alone (``unmatched``),
    samples cannot be matched, and only medians and parameters are compared.
    """

    common: int
    added: list[Id]
    removed: list[Id]
    by_position: bool
    loss: tuple[float, float]
    norm: tuple[float, float]
    noise: tuple[float | None, float | None]
    relabelled: list[Id]
    repredicted: int
    new_suspects: list[Id]
    cleared: list[Id]
    movers: Table
    parameters: Table
    unmatched: bool = False

    def __str__(self) -> str:
        return "\n".join(changes(self))


def load(path: str | Path) -> Snapshot:
    """Read what :meth:`Report.to_json` wrote."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        return _snapshot(found)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}",
            fix="give a file written with --json or report.to_json",
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a report of persample inspect",
            why=f"{type(error).__name__}: {error}",
            fix="give a file written with --json or report.to_json",
        ) from error


def _snapshot(found: dict[str, Any]) -> Snapshot:
    rows = found["samples"]
    noise = found["noise scale"]

    def column(name: str) -> Tensor:
        values = [math.nan if v is None else float(v) for v in rows[name]]
        return torch.tensor(values, dtype=torch.float64)

    whole = {k: torch.tensor(rows[k]) if k in rows else None for k in ("label", "prediction")}
    return Snapshot(
        ids=list(rows["id"]),
        ids_given=bool(found["ids given"]),
        losses=column("loss"),
        norms=column("norm"),
        suspicion=column("suspicion"),
        labels=whole["label"],
        predictions=whole["prediction"],
        parameters={p["name"]: float(p["quantiles"][3]) for p in found["parameters"]},
        noise=None if noise is None else noise["value"],
        model=str(found["model"]),
        in_order=bool(found.get("samples in the order of the data", True)),
    )


def compare(old: Snapshot, new: Snapshot, k: int = 20) -> Comparison:
    """Match samples by id; medians before and after; who became and who stopped being suspect."""
    unmatched = not all(side.ids_given or side.in_order for side in (old, new))
    where = {} if unmatched else {key: i for i, key in enumerate(old.ids)}
    pairs = [(where[key], j) for j, key in enumerate(new.ids) if key in where]
    before = torch.tensor([i for i, _ in pairs], dtype=torch.long)
    after = torch.tensor([j for _, j in pairs], dtype=torch.long)
    fresh = set(new.ids)
    was, now = old.suspicion[before] > STRONG, new.suspicion[after] > STRONG
    ids = [new.ids[j] for j in after.tolist()]
    return Comparison(
        common=len(pairs),
        added=[] if unmatched else [key for key in new.ids if key not in where],
        removed=[] if unmatched else [key for key in old.ids if key not in fresh],
        by_position=not (old.ids_given and new.ids_given),
        loss=(_median(old.losses), _median(new.losses)),
        norm=(_median(old.norms), _median(new.norms)),
        noise=(old.noise, new.noise),
        relabelled=[ids[i] for i in _different(old.labels, new.labels, before, after)],
        repredicted=len(_different(old.predictions, new.predictions, before, after)),
        new_suspects=[ids[i] for i in (now & ~was).nonzero().flatten().tolist()],
        cleared=[ids[i] for i in (was & ~now).nonzero().flatten().tolist()],
        movers=_movers(old, new, before, after, k),
        parameters=_parameters(old, new),
        unmatched=unmatched,
    )


def _movers(old: Snapshot, new: Snapshot, before: Tensor, after: Tensor, k: int) -> Table:
    """Samples by how far their suspicion moved."""
    moved = torch.nan_to_num(new.suspicion[after] - old.suspicion[before])
    top = moved.abs().topk(min(k, len(moved))).indices
    top = top[moved[top].abs() > 0]
    i, j = before[top], after[top]
    places_before, places_after = rank(old.norms), rank(new.norms)
    return Table(
        {
            "id": [new.ids[x] for x in j.tolist()],
            "position": j,
            "suspicion before": old.suspicion[i],
            "suspicion now": new.suspicion[j],
            "loss before": old.losses[i],
            "loss now": new.losses[j],
            "norm rank before": places_before[i],
            "norm rank now": places_after[j],
        }
    )


def _parameters(old: Snapshot, new: Snapshot) -> Table:
    names = [name for name in new.parameters if name in old.parameters]
    was, now = [old.parameters[n] for n in names], [new.parameters[n] for n in names]
    ratio = [b / a if a else math.nan for a, b in zip(was, now, strict=True)]
    return Table({"parameter": names, "median before": was, "median now": now, "ratio": ratio})


def _different(a: Tensor | None, b: Tensor | None, i: Tensor, j: Tensor) -> list[int]:
    if a is None or b is None:
        return []
    return (a[i] != b[j]).nonzero().flatten().tolist()


def _median(values: Tensor) -> float:
    fine = values[torch.isfinite(values)]
    return float(fine.median()) if fine.numel() else math.nan


def changes(told: Comparison, *, movers: bool = True) -> list[str]:
    """What changed, a line each."""
    lines = [UNMATCHED if told.unmatched else f"{told.common:,} samples in both"]
    if told.by_position and not told.unmatched:
        lines.append(BY_POSITION)
    for name, ids in (("new", told.added), ("gone", told.removed), ("relabelled", told.relabelled)):
        if ids:
            lines.append(f"{len(ids):,} {name}: {_few(ids)}")
    for name, (a, b) in (("loss", told.loss), ("norm", told.norm)):
        lines.append(f"median {name} {number(a)} → {number(b)}")
    if told.noise[0] is not None and told.noise[1] is not None:
        lines.append(f"noise scale {number(told.noise[0])} → {number(told.noise[1])}")
    if told.repredicted:
        lines.append(f"{told.repredicted:,} predictions changed")
    for name, ids in (("became suspect", told.new_suspects), ("no longer suspect", told.cleared)):
        if ids:
            lines.append(f"{len(ids):,} {name}: {_few(ids)}")
    if movers and len(told.movers):
        heads = ["id", "suspicion before", "suspicion now", "loss before", "loss now"]
        rows = [[written(row[h]) for h in heads] for row in told.movers.rows()]
        lines += ["", *aligned([heads, *rows[:8]])]
    return lines


def _few(ids: list[int | str]) -> str:
    return ", ".join(map(str, ids[:8])) + (" …" if len(ids) > 8 else "")
