"""What is found, in words: the same sentences for the terminal and the page."""

from __future__ import annotations

from dataclasses import dataclass

from .findings import Findings
from .table import number

NOT_PRIVATE = (
    "This curve is computed from the data, so it is not private: no privacy guarantee covers a "
    "threshold chosen by looking at it."
)
NOISE_CAVEAT = (
    "It holds at this point of training and for random batches. The mean gradient is estimated "
    "from projections; near a minimum it vanishes and the ratio means little."
)
IDENTICAL = "The model received exactly the same input for these samples, byte by byte."
ALIKE = (
    "The inputs differ, but the gradients differ by less than 2% of their norm. Easy samples of "
    "one class often look like this; they need not be duplicates."
)
NOT_COMPARED = (
    "The gradients differ by less than 2% of their norm. The inputs could not be compared, so "
    "these need not be duplicates."
)
SHORT_STEP = 0.05  # seconds of a plain step below which fixed costs dominate


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding: its section, its state ("good", "note", "bad" or "fact") and its words."""

    section: str
    state: str
    head: str
    text: str


def verdicts(report: Findings) -> list[Verdict]:
    """The findings, most useful first; a failed self-check before all others."""
    found = [
        _suspects(report), _dominance(report), _duplicates(report), _nonfinite(report),
        _verified(report), _cost(report),
    ]  # fmt: skip
    if report.planted is not None:
        found.insert(0, Verdict("suspects", "good", report.planted.head, report.planted.text))
    check = report.verification
    failed = check is not None and not check.ok
    return sorted(found, key=lambda verdict: verdict.section != "check") if failed else found


def _verified(report: Findings) -> Verdict:
    check = report.verification
    if check is None:
        return Verdict("check", "note", "Not verified", report.collected.unverified)
    if check.ok:
        return Verdict(
            "check", "good", "Gradients verified",
            f"the gradients of {check.n} samples agree with autograd and are independent of each "
            "other",
        )  # fmt: skip
    wrong = next(p.name for p in check.parameters if not p.ok)
    if check.interacting:
        return Verdict(
            "check", "bad", "Samples interact",
            f"the gradient of {wrong} changes when other samples are replaced: do not trust this "
            "report",
        )  # fmt: skip
    return Verdict(
        "check",
        "bad",
        "Wrong gradients",
        f"{wrong} differs from autograd: do not trust this report",
    )


def _cost(report: Findings) -> Verdict:
    cost = report.cost
    head = f"{report.count:,} samples in {cost.total:.{1 if cost.total >= 1 else 2}f} s"
    if cost.ratio is None:
        return Verdict("cost", "fact", head, "no plain step was timed for comparison")
    text = f"inspecting a batch takes {cost.ratio:.1f}× a plain forward and backward pass"
    if cost.plain_seconds < SHORT_STEP:
        text += (
            f"; plain steps of {number(1000 * cost.plain_seconds)} ms are short, so fixed costs "
            "dominate"
        )
    return Verdict("cost", "fact", head, text)


def _suspects(report: Findings) -> Verdict:
    count = report.strong
    what = "label" if report.labels is not None else "sample"
    return Verdict(
        "suspects", "note" if count else "good",
        f"{count:,} suspect {what}{'' if count == 1 else 's'}",
        "large gradients that disagree with their nearest neighbours",
    )  # fmt: skip


def _dominance(report: Findings) -> Verdict:
    share = report.share(0.01)
    return Verdict(
        "outliers", "note" if share > 0.25 else "good", f"Top 1% carry {share:.0%}",
        "of the total gradient norm: the 1% of samples with the largest gradients",
    )  # fmt: skip


def _duplicates(report: Findings) -> Verdict:
    made = report.likeness
    count = sum(len(group) - 1 for group in made.identical)
    near = sum(made.distinct(group) - 1 for group in made.alike)
    if not made.compared:
        text = "inputs could not be compared; " + _near(near, "")
        return Verdict("duplicates", "note", "Duplicates unknown", text)
    text = "samples with the same input as an earlier one" if count else "no two inputs are equal"
    if made.conflicting:
        groups = len(made.conflicting)
        text += f", {groups:,} group{'' if groups == 1 else 's'} with different labels"
    return Verdict(
        "duplicates", "note" if count else "good",
        f"{count:,} duplicate{'' if count == 1 else 's'}",
        f"{text}; {_near(near, 'more ' if count else '')}",
    )  # fmt: skip


def _near(count: int, more: str) -> str:
    if not count:
        return f"no {'other ' if more else ''}two gradients are nearly equal"
    return f"{count:,} {more}{'has' if count == 1 else 'have'} nearly the gradient of another"


def _nonfinite(report: Findings) -> Verdict:
    count = len(report.nonfinite)
    text = "samples with a NaN or infinite loss or gradient; left out of everything else"
    return Verdict(
        "nonfinite", "bad" if count else "good", f"{count:,} not finite",
        text if count else "every loss and every gradient is finite",
    )  # fmt: skip


def title(report: Findings) -> str:
    """Model and size of the data."""
    batches = "1 batch" if report.batches == 1 else f"{report.batches:,} batches"
    return f"{report.model_name}, {report.count:,} samples in {batches}"


def id_head(report: Findings) -> str:
    """The head of the column with ids: a position is not an id."""
    return "id" if report.ids_given else "position"


def remarks(report: Findings) -> list[str]:
    """Warnings that concern the whole report."""
    found = []
    made = report.collected
    if report.interrupted:
        found.append("Interrupted: this report covers only the samples seen before.")
    if not report.ids_given and not report.in_order:
        why = f" ({made.ids.order.why})" if made.ids.order.why else ""
        found.append(
            "No ids were given: pass-7 is the eighth sample of this pass, not index 7 of the data "
            f'set{why}. Pass ids="idx" to read them from a field of the batch.'
        )
    given = made.ids.available
    whole = not (report.interrupted or made.limited)
    if given is not None and given != report.count and whole:
        found.append(f"{given:,} ids were given for {report.count:,} samples.")
    if made.dropout:
        found.append(
            "Dropout is active, so gradients differ from run to run. Call model.eval() first."
        )
    if not bool(report.finite.any()):
        found.append("No sample has a finite gradient, so there is nothing to report.")
    return found


def clip_words(report: Findings) -> str:
    """Half of the samples are clipped at the median norm."""
    sizes = report.norms[report.finite]
    if not sizes.numel():
        return ""
    median, curve = float(sizes.median()), report.clip_curve
    if not len(curve.thresholds):
        return "Every gradient is zero."
    at = int((curve.thresholds - median).abs().argmin())
    return (
        f"At C = {number(median)}, the median norm, half of the samples are clipped and the mean "
        f"gradient changes by {float(curve.bias[at]):.0%} of its norm."
    )


def noise_words(report: Findings) -> str:
    """The noise scale in a sentence."""
    noise = report.noise
    if noise is None:
        return "Not estimated: it needs two batches of at least two samples."
    if noise.value is None or noise.low is None or noise.high is None:
        return (
            f"Not reported: over {noise.batches} batches the mean gradient is indistinguishable "
            f"from zero (tr Σ = {number(noise.trace)})."
        )
    return (
        f"tr Σ / |G|² = {number(noise.value)} over {noise.batches} batches (between "
        f"{number(noise.low)} and {number(noise.high)}). Batches much larger than this gain "
        "little; in much smaller ones the gradient is mostly noise."
    )
