"""The report on a terminal: findings first, then the samples worth a look."""

from __future__ import annotations

from typing import Any

import torch

from . import words
from .compare import changes
from .findings import Findings
from .table import aligned, number

COLOURS = {"good": "32", "note": "33", "bad": "31", "fact": "2", "head": "1", "quiet": "2"}
SIGNS = {"good": "✓", "note": "•", "bad": "✗", "fact": "·"}


def summary(report: Findings, *, colour: bool = False, k: int = 8, again: Any = None) -> str:
    """About a screen of text; ``again`` is a :class:`Comparison` with an earlier report."""

    def paint(text: str, name: str) -> str:
        return f"\x1b[{COLOURS[name]}m{text}\x1b[0m" if colour else text

    found = words.verdicts(report)
    lines = [paint(words.title(report), "head"), ""]
    if report.planted is not None:
        lines += [paint(report.planted.head, "head"), f"  {report.planted.text}", ""]
        found = [v for v in found if v.head != report.planted.head]
    width = max(len(v.head) for v in found)
    lines += [
        f"  {paint(SIGNS[v.state], v.state)} {v.head.ljust(width)}  {paint(v.text, 'quiet')}"
        for v in found
    ]
    lines += [f"  ! {text}" for text in words.remarks(report)]
    for title, table in (
        ("suspects, most suspicious first", report.suspects(k)),
        ("largest gradients", report.outliers(min(k, 5))),
    ):
        if len(table):
            lines += ["", paint(title, "head")]
            indices = torch.as_tensor(table["position"]).tolist()
            lines += ["  " + line for line in aligned(_samples(report, indices))]
    made = report.likeness
    near = "nearly equal gradients, different inputs" if made.compared else "nearly equal gradients"
    for title, groups in (("identical inputs", made.identical), (near, made.alike)):
        if groups:
            lines += ["", paint(title, "head"), *(f"  {_group(report, g)}" for g in groups[:5])]
            lines += [f"  … and {len(groups) - 5:,} more groups"] if len(groups) > 5 else []
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


def _samples(report: Findings, indices: list[int]) -> list[list[str]]:
    heads = [words.id_head(report), "suspicion", "norm", "loss"]
    heads += ["label"] if report.labels is not None else []
    heads += ["model says"] if report.predictions is not None else []
    heads += ["neighbours say"] if report.suspicion.vote is not None else []
    heads += ["planted"] if report.planted is not None else []
    rows = [heads + (["text"] if _text(report, indices[0]) else [])]
    for i in indices:
        row = [str(report.ids[i]), f"{float(report.suspicion.score[i]):.2f}"]
        row += [number(float(report.norms[i])), number(float(report.losses[i]))]
        for column in (report.labels, report.predictions, report.suspicion.vote):
            if column is not None:
                row.append(report.class_name(int(column[i])))
        if report.planted is not None:
            row.append("planted" if i in report.planted.positions else "")
        text = _text(report, i)
        rows.append(row + ([text] if len(rows[0]) > len(row) else []))
    return rows


def _group(report: Findings, group: list[int]) -> str:
    more = f"  and {len(group) - 8:,} more" if len(group) > 8 else ""
    conflict = "  (different labels)" if group in report.likeness.conflicting else ""
    return "  ".join(str(report.ids[i]) for i in group[:8]) + more + conflict


def _text(report: Findings, index: int) -> str:
    shown = report.shown(index)
    text = shown.text or " ".join(shown.tokens or ())
    text = " ".join(text.split())
    return text if len(text) <= 48 else text[:47] + "…"
