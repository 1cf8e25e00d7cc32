"""The report on a terminal: findings first, then the samples worth a look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import words
from .table import aligned, number, written

if TYPE_CHECKING:
    from .compare import Comparison
    from .report import Report

COLOURS = {"good": "32", "note": "33", "bad": "31", "head": "1", "quiet": "2"}
SIGNS = {"good": "✓", "note": "•", "bad": "✗"}


def summary(report: Report, *, colour: bool = False, k: int = 8, again: Any = None) -> str:
    """About a screen of text; ``again`` is a :class:`Comparison` with an earlier report."""

    def paint(text: str, name: str) -> str:
        return f"\x1b[{COLOURS[name]}m{text}\x1b[0m" if colour else text

    found = words.verdicts(report)
    width = max(len(v.head) for v in found)
    lines = [paint(words.title(report), "head"), ""]
    lines += [
        f"  {paint(SIGNS[v.state], v.state)} {v.head.ljust(width)}  {paint(v.text, 'quiet')}"
        for v in found
    ]
    lines += [f"  ! {text}" for text in words.remarks(report)]
    for title, table in (
        ("suspects, most likely first", report.suspects(k)),
        ("largest gradients", report.outliers(min(k, 5))),
    ):
        if len(table):
            lines += ["", paint(title, "head")]
            indices = torch.as_tensor(table["index"]).tolist()
            lines += ["  " + line for line in aligned(_samples(report, indices))]
    if report.groups:
        lines += ["", paint("near-duplicates", "head")]
        lines += [f"  {'  '.join(str(report.ids[i]) for i in g[:8])}" for g in report.groups[:5]]
    if len(report.nonfinite):
        shown = ", ".join(str(report.ids[i]) for i in report.nonfinite[:10].tolist())
        lines += ["", paint("not finite", "head"), f"  {shown}"]
    if report.without_gradient:
        lines += ["", paint("parameters without gradient", "head")]
        lines += [f"  {name}" for name in report.without_gradient[:10]]
    lines += ["", paint("clipping", "head"), f"  {words.clip_words(report)}"]
    lines += [f"  {paint(words.NOT_PRIVATE, 'quiet')}"]
    lines += ["", paint("noise scale", "head"), f"  {words.noise_words(report)}"]
    if again is not None:
        lines += ["", paint("what changed", "head"), *(f"  {line}" for line in changes(again))]
    return "\n".join(lines)


def _samples(report: Report, indices: list[int]) -> list[list[str]]:
    heads = ["id", "suspicion", "norm", "loss"]
    heads += ["label"] if report.labels is not None else []
    heads += ["model says"] if report.predictions is not None else []
    heads += ["neighbours say"] if report.suspicion.vote is not None else []
    rows = [heads + (["text"] if _text(report, indices[0]) else [])]
    for i in indices:
        row = [str(report.ids[i]), f"{float(report.suspicion.score[i]):.2f}"]
        row += [number(float(report.norms[i])), number(float(report.losses[i]))]
        for column in (report.labels, report.predictions, report.suspicion.vote):
            if column is not None:
                row.append(report.class_name(int(column[i])))
        text = _text(report, i)
        rows.append(row + ([text] if len(rows[0]) > len(row) else []))
    return rows


def _text(report: Report, index: int) -> str:
    shown = report.shown(index)
    text = shown.text or " ".join(shown.tokens or ())
    text = " ".join(text.split())
    return text if len(text) <= 48 else text[:47] + "…"


def changes(told: Comparison, *, movers: bool = True) -> list[str]:
    """What changed, a line each."""
    lines = [f"{told.common:,} samples in both"]
    if told.by_position:
        lines.append(words.BY_POSITION)
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
