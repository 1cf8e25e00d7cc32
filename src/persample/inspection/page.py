"""The page: one self-contained HTML file."""

from __future__ import annotations

from html import escape
from pathlib import Path

import torch

from . import words
from .compare import Comparison
from .compare import changes as lines_of
from .findings import Findings
from .picture import picture
from .plots import boxes, clip_plot, histogram
from .samples import plain_table, sample_table
from .scores import STRONG
from .table import number

HERE = Path(__file__).parent
GROUPS = 24  # groups of duplicates that are shown


def page(report: Findings, changes: Comparison | None = None, *, k: int = 24) -> str:
    """All of it. Sections without content are left out."""
    parts = [
        ("changed", "Changes", "What changed", _changed(changes)),
        ("suspects", "Suspects", "Suspects", _suspects(report, k)),
        ("outliers", "Largest", "Largest gradients", _outliers(report, k)),
        ("duplicates", "Duplicates", "Duplicates", _duplicates(report)),
        ("nonfinite", "Not finite", "Not finite", _nonfinite(report, k)),
        ("layers", "Parameters", "Gradient norms by parameter", _layers(report)),
        ("clipping", "Clipping", "Effect of clipping", _clipping(report)),
        ("noise", "Noise", "Gradient noise scale", _noise(report)),
        ("unused", "Unused", "Parameters without gradient", _unused(report)),
        ("check", "Self-check", "Self-check", _check(report)),
        ("cost", "Cost", "Cost of this inspection", _cost(report)),
    ]
    kept = [(name, title, body) for name, _, title, body in parts if body]
    links = "".join(f'<a href="#{name}">{short}</a>' for name, short, _, body in parts if body)
    sections = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>'
        f"{body}</section>"
        for name, title, body in kept
    )
    style = (HERE / "page.css").read_text(encoding="utf-8")
    script = (HERE / "page.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(words.title(report))}</title>'
        f"<style>{style}</style><noscript><style>tr[hidden]{{display:table-row}}</style></noscript>"
        f"</head><body>{_header(report)}<nav aria-label='sections'>{links}</nav>"
        f"<main>{sections}</main>{_footer()}<script>{script}</script></body></html>\n"
    )


def _header(report: Findings) -> str:
    tiles = "".join(_tile(report, verdict) for verdict in words.verdicts(report))
    notes = "".join(f'<p class="remark">{escape(text)}</p>' for text in words.remarks(report))
    size = sum(torch.Size(shape).numel() for shape in report.collected.shapes)
    return (
        '<header><button type="button" id="theme" aria-label="switch between light and dark">'
        "◐</button>"
        f"<p class='kicker'>persample inspect</p><h1>{escape(report.model_name)}: "
        f"{report.count:,} per-sample gradients</h1><p class='lead'>Samples with unusually large "
        "gradients, or gradients that point against those of similar samples, are worth a look. "
        f"{report.batches:,} batch{'' if report.batches == 1 else 'es'}, {size:,} parameters.</p>"
        f'{notes}<div class="tiles">{tiles}</div></header>'
    )


def _tile(report: Findings, verdict: words.Verdict) -> str:
    first = report.planted is not None and verdict.head == report.planted.head
    return (
        f'<a class="tile {verdict.state}{" wide" if first else ""}" href="#{verdict.section}">'
        f"<strong>{escape(verdict.head)}</strong><span>{escape(verdict.text)}</span></a>"
    )


def _footer() -> str:
    return (
        "<footer><p><b>norm</b>: L2 norm of the sample's gradient. <b>suspicion</b>: from 0 to 1; "
        "high if a large gradient disagrees with its nearest gradients and with its class. "
        "<b>cosine</b>: +1 same direction, −1 opposite direction.</p><p>Keys: Tab moves, Enter "
        "opens a sample or sorts a column, ↑ ↓ move between samples, Esc closes.</p></footer>"
    )


def _changed(changes: Comparison | None) -> str:
    if changes is None:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in lines_of(changes, movers=False))
    text = f'<ul class="facts">{lines}</ul>'
    if len(changes.movers):
        columns = [name for name in changes.movers.columns if name != "position"]
        rows = [[row[name] for name in columns] for row in changes.movers.rows()][:10]
        text += "<h3>Samples whose suspicion changed most</h3>"
        text += plain_table(columns, rows, "movers")
    return text


def _suspects(report: Findings, k: int) -> str:
    if not bool(report.finite.any()):
        return ""
    what = "its label is probably wrong" if report.labels is not None else "it is probably unusual"
    indices = torch.as_tensor(report.suspects(k)["position"]).tolist()
    planted = ""
    if report.planted is not None:
        planted = (
            f' <span class="planted">planted</span> marks the {len(report.planted.positions):,} '
            "labels that were changed on purpose."
        )
    return (
        f"<p>Most suspicious first. A score above {STRONG} counts as a suspect: {report.strong:,} "
        f"of {report.count:,}. Similar inputs have nearly parallel gradients; if most of a "
        f"sample's nearest gradients point the other way, {what}.{planted}</p>"
        + sample_table(report, indices, "suspects")
    )


def _outliers(report: Findings, k: int) -> str:
    if not bool(report.finite.any()):
        return ""
    indices = torch.as_tensor(report.outliers(k // 2 or 1)["position"]).tolist()
    sizes = report.norms[report.finite]
    median = float(sizes.median())
    times = f", {number(float(sizes.max()) / median)} times the median" if median else ""
    plot = histogram(sizes, "gradient norm", marked=report.norms[indices].tolist())
    return (
        f"<p>The largest gradient norm is {number(float(sizes.max()))}{times}. The top 1% of "
        f"samples carry {report.share(0.01):.0%} of the total norm. Dots mark the samples "
        "below.</p>"
        f"<figure>{plot}</figure>" + sample_table(report, indices, "outliers")
    )


def _duplicates(report: Findings) -> str:
    made = report.likeness
    near = words.ALIKE if made.compared else words.NOT_COMPARED
    return _groups(report, made.identical, "Identical inputs", words.IDENTICAL) + _groups(
        report, made.alike, "Nearly equal gradients", near
    )


def _groups(report: Findings, groups: list[list[int]], title: str, text: str) -> str:
    cards = []
    for group in groups[:GROUPS]:
        members = "".join(
            f"<figure>{picture(report.shown(i), f'sample {report.ids[i]}')}"
            f"<figcaption>{escape(str(report.ids[i]))}</figcaption></figure>"
            for i in group[:6]
        )
        more = f"<span>and {len(group) - 6:,} more</span>" if len(group) > 6 else ""
        if group in report.likeness.conflicting:
            more += "<span>different labels</span>"
        cards.append(f'<div class="group">{members}{more}</div>')
    if not cards:
        return ""
    rest = len(groups) - GROUPS
    more = f"<p>… and {rest:,} more groups, in the JSON file.</p>" if rest > 0 else ""
    count = f"{len(groups):,} group{'' if len(groups) == 1 else 's'}"
    return f'<h3>{title}: {count}</h3><p>{text}</p><div class="groups">{"".join(cards)}</div>{more}'


def _nonfinite(report: Findings, k: int) -> str:
    indices = report.nonfinite.tolist()
    if not indices:
        return ""
    return (
        f"<p>{len(indices):,} samples have a loss or a gradient that is NaN or infinite. They are "
        "left out of everything else on this page.</p>"
        + sample_table(report, indices[:k], "nonfinite")
    )


def _layers(report: Findings) -> str:
    plot = boxes(report.parameters)
    if not plot:
        return ""
    return (
        "<p>Boxes show the middle half of the samples, whiskers 5% to 95%. On the right: the "
        f"parameter's share of the total squared norm.</p><figure>{plot}</figure>"
    )


def _clipping(report: Findings) -> str:
    plot = clip_plot(report.clip_curve)
    if not plot:
        return ""
    return (
        f'<p class="remark">{words.NOT_PRIVATE}</p><p>{escape(words.clip_words(report))} '
        '<span class="key clipped">samples clipped</span> <span class="key bias">bias of the mean '
        f"gradient</span> (estimated from projections).</p><figure>{plot}</figure>"
    )


def _noise(report: Findings) -> str:
    return f"<p>{escape(words.noise_words(report))}</p><p class='quiet'>{words.NOISE_CAVEAT}</p>"


def _unused(report: Findings) -> str:
    names = "".join(f"<li><code>{escape(name)}</code></li>" for name in report.without_gradient)
    return f"<p>The gradient is zero for every sample:</p><ul>{names}</ul>" if names else ""


def _check(report: Findings) -> str:
    check = report.verification
    if check is None:
        return f"<p>Not run: {escape(report.collected.unverified)}.</p>"
    rows = [(p.name, p.sums, p.isolation, "ok" if p.ok else "WRONG") for p in check.parameters]
    table = plain_table(["parameter", "Σ c·g against autograd", "isolation", ""], rows, "check")
    return (
        f"<p>On {check.n} samples of the first batch: random combinations of their gradients are "
        "compared with autograd, and one sample is replaced to see whether the others change "
        f"(largest relative deviation; tolerance {check.tolerance:.0e}).</p>"
        f"<details><summary>every parameter</summary>{table}</details>"
    )


def _cost(report: Findings) -> str:
    cost, made = report.cost, report.collected
    rows = [
        (name, seconds) for name, seconds in cost.seconds.items() if seconds > 1e-4 * cost.total
    ]
    rows.append(("total", cost.total))
    text = ""
    if cost.ratio is not None:
        text = (
            f"<p>Inspecting a batch takes {cost.ratio:.2f} times a plain forward and backward "
            f"pass, measured on {len(cost.plain)} of the same batches. It includes norms, "
            "projections and copies of the samples. The fixed cost per batch weighs most on small "
            "models and small batches; a recording alone costs less.</p>"
        )
    text += plain_table(["part", "seconds"], rows, "cost")
    for title, lines in (("Slow operators", made.slow), ("Ambiguous sizes", made.ambiguous)):
        if lines:
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            text += f"<h3>{title}</h3><ul class='facts'>{items}</ul>"
    if made.position_names and len(made.position_names) < len(made.names):
        text += (
            f"<p class='quiet'>Token colours count {len(made.position_names)} of "
            f"{len(made.names)} parameters; the others are used without positions.</p>"
        )
    if made.without_positions:
        text += f"<p class='quiet'>No token colours: {escape(made.without_positions)}.</p>"
    return text
