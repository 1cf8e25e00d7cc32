"""Tables of samples for the page: sortable; each row opens to the details of the sample."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .findings import Findings
from .picture import picture
from .table import number, written
from .words import id_head

PARAMETERS = 8  # parameters shown in an opened sample


def sample_table(report: Findings, indices: Sequence[int], name: str) -> str:
    """A table with one group of two rows per sample: the summary, and the details it opens to."""
    heads = ["", "sample", id_head(report)]
    if report.labels is not None:
        heads.append("label")
    if report.predictions is not None:
        heads.append("model says")
    if report.suspicion.vote is not None:
        heads.append("neighbours say")
    heads += ["loss", "norm", "suspicion"]
    by = "norm" if name == "outliers" else "suspicion"
    cells = "".join(_head(k, head, head == by) for k, head in enumerate(heads))
    body = "".join(_sample(report, i, f"{name}-{i}", len(heads)) for i in indices)
    return (
        f'<div class="scroll"><table class="sortable samples" id="{name}-table"><thead><tr>{cells}'
        f"</tr></thead>{body}</table></div>"
    )


def _head(k: int, head: str, sorted_by: bool) -> str:
    if head in ("", "sample"):
        return f'<th><span class="quiet">{head}</span></th>'
    way = "descending" if sorted_by else "none"
    kind = ' class="number"' if head in ("loss", "norm", "suspicion") else ""
    button = f'<button type="button" data-column="{k}">{head}</button>'
    return f'<th{kind} aria-sort="{way}">{button}</th>'


def _sample(report: Findings, i: int, key: str, width: int) -> str:
    said = f"sample {report.ids[i]}"
    shown = picture(report.shown(i), said)
    score = float(report.suspicion.score[i])
    cells = [
        f'<td><button type="button" class="open" aria-expanded="false" aria-controls="{key}" '
        f'aria-label="details of {escape(said)}"></button></td>',
        f'<td class="picture">{shown}</td>',
        f'<td data-value="{i}" class="id">{escape(str(report.ids[i]))}{_badge(report, i)}</td>',
    ]
    label = None if report.labels is None else int(report.labels[i])
    if label is not None:
        cells.append(f'<td data-value="{label}">{escape(report.class_name(label))}</td>')
    for opinion in (report.predictions, report.suspicion.vote):
        if opinion is not None:
            guess = int(opinion[i])
            wrong = ' class="differs"' if guess != label else ""
            name = escape(report.class_name(guess))
            cells.append(f'<td data-value="{guess}"{wrong}>{name}</td>')
    for value in (float(report.losses[i]), float(report.norms[i])):
        cells.append(f'<td class="number" data-value="{value}">{number(value)}</td>')
    cells.append(
        f'<td class="number" data-value="{score}"><span class="meter" style="--part:{score:.3f}">'
        f"</span>{score:.2f}</td>"
    )
    return (
        f"<tbody><tr>{''.join(cells)}</tr>"
        f'<tr class="detail" id="{key}" hidden><td colspan="{width}">{_details(report, i)}</td>'
        "</tr></tbody>"
    )


def _badge(report: Findings, i: int) -> str:
    known = report.planted is not None and i in report.planted.positions
    return ' <span class="planted">planted</span>' if known else ""


def _details(report: Findings, i: int) -> str:
    whole = picture(report.shown(i), f"sample {report.ids[i]}", large=True)
    parts = [f'<div class="whole">{whole}</div>'] if whole else []
    return '<div class="details">' + "".join(
        [*parts, _reasons(report, i), _nearest(report, i), _shares(report, i)]
    ) + "</div>"  # fmt: skip


def _reasons(report: Findings, i: int) -> str:
    """The parts of the score in words."""
    if not bool(report.finite[i]):
        return "<div><h4>Not finite</h4><p>Its loss or gradient is NaN or infinite.</p></div>"
    made = report.suspicion
    lines = [
        f"gradient norm: rank {_place(report, i):,} of {int(report.finite.sum()):,}",
        f"mean cosine with the nearest gradients: {float(made.agreement[i]):+.2f}",
    ]
    if made.class_agreement is not None:
        lines.append(f"cosine with its class: {float(made.class_agreement[i]):+.2f}")
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f"<div><h4>Why this score</h4><ul>{items}</ul></div>"


def _place(report: Findings, i: int) -> int:
    """How many gradients have at least this norm."""
    return int((report.norms[report.finite] >= report.norms[i]).sum())


def _nearest(report: Findings, i: int) -> str:
    """The nearest gradients: in the same or in the opposite direction."""
    near = report.suspicion.neighbours
    cards = []
    for j, cosine in zip(near.indices[i, :6].tolist(), near.cosines[i, :6].tolist(), strict=True):
        if cosine == 0:
            continue
        label = "" if report.labels is None else report.class_name(int(report.labels[j]))
        way = "same" if cosine > 0 else "against"
        said = f"sample {report.ids[j]}, {'same' if cosine > 0 else 'opposite'} direction"
        shown = picture(report.shown(j), said) or escape(str(report.ids[j]))
        cards.append(
            f'<figure class="{way}" title="{escape(said)}">{shown}<figcaption>{escape(label)} '
            f"<b>{cosine:+.2f}</b></figcaption></figure>"
        )
    if not cards:
        return ""
    return f'<div><h4>Nearest gradients (cosine)</h4><div class="near">{"".join(cards)}</div></div>'


def _shares(report: Findings, i: int) -> str:
    """The parameters with the largest share of the squared norm."""
    squares = report.parameter_norms[i].double().square()
    total = float(squares.sum())
    if not 0 < total < float("inf"):
        return ""
    top = squares.topk(min(PARAMETERS, len(squares))).indices.tolist()
    rows = "".join(
        f'<li><span class="meter" style="--part:{float(squares[k]) / total:.3f}"></span>'
        f"{float(squares[k]) / total:4.0%} {escape(report.names[k])}</li>"
        for k in top
        if float(squares[k]) / total >= 0.005
    )
    return f'<div><h4>Share of the squared norm</h4><ul class="shares">{rows}</ul></div>'


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[object]], name: str) -> str:
    """A sortable table without details."""
    numeric = [all(isinstance(row[k], (int, float)) for row in rows) for k in range(len(heads))]
    cells = "".join(
        f'<th{" class=number" if numeric[k] else ""} aria-sort="none">'
        f'<button type="button" data-column="{k}">{escape(h)}</button></th>'
        for k, h in enumerate(heads)
    )
    body = "".join(
        "<tbody><tr>"
        + "".join(
            f'<td class="{"number" if isinstance(v, (int, float)) else ""}" '
            f'data-value="{escape(str(v))}">{escape(written(v))}</td>'
            for v in row
        )
        + "</tr></tbody>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="sortable" id="{name}-table"><thead><tr>{cells}</tr>'
        f"</thead>{body}</table></div>"
    )
