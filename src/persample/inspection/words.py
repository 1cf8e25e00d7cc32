"""What is found, in words: the same sentences for the terminal and the page."""

from __future__ import annotations

from dataclasses import dataclass

from .findings import Findings
from .table import number

NOT_PRIVATE = (
    "Computed from the data, so it is not private: a threshold chosen by looking at it is not "
    "covered by a privacy guarantee."
)
NOISE_CAVEAT = (
    "It holds at this point of training and for batches drawn at random. The mean gradient is "
    "estimated from projections; near a minimum it vanishes and the ratio means little."
)
IDENTICAL = "What the model received of these samples is the same, byte by byte."
ALIKE = (
    "Different inputs with gradients that differ by less than 2% of their norm, as easy samples of "
    "one class often do: not necessarily duplicates."
)
NOT_COMPARED = (
    "Gradients differ by less than 2% of their norm. Inputs could not be compared, so these need "
    "not be duplicates."
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding: where it is told, how it stands ("good", "note" or "bad"), what it says."""

    section: str
    state: str
    head: str
    text: str


def verdicts(report: Findings) -> list[Verdict]:
    """The findings, most useful first."""
    return [
        _verified(report), _cost(report), _suspects(report), _dominance(report),
        _duplicates(report), _nonfinite(report),
    ]  # fmt: skip


def _verified(report: Findings) -> Verdict:
    check = report.verification
    if check is None:
        return Verdict("check", "note", "Not verified", report.collected.unverified)
    if check.ok:
        return Verdict(
            "check", "good", "Verified",
            f"gradients of {check.n} samples agree with autograd and do not depend on each other",
        )  # fmt: skip
    wrong = next(p.name for p in check.parameters if not p.ok)
    return Verdict("check", "bad", "Wrong", f"{wrong} disagrees: do not trust this report")


def _cost(report: Findings) -> Verdict:
    ratio = report.cost.ratio
    if ratio is None:
        return Verdict("cost", "note", f"{report.cost.total:.1f} s", "no plain step was timed")
    rate = report.count / report.cost.total if report.cost.total else 0.0
    return Verdict(
        "cost", "good" if ratio <= 2 else "note", f"{ratio:.1f}× a plain step",
        f"inspected in {report.cost.total:.1f} s, {number(rate)} samples a second",
    )  # fmt: skip


def _suspects(report: Findings) -> Verdict:
    count = report.strong
    what = "label" if report.labels is not None else "sample"
    return Verdict(
        "suspects", "note" if count else "good",
        f"{count:,} suspect {what}{'' if count == 1 else 's'}",
        "large gradients that the gradients nearest to them contradict",
    )  # fmt: skip


def _dominance(report: Findings) -> Verdict:
    share = report.share(0.01)
    return Verdict(
        "outliers", "note" if share > 0.25 else "good", f"Top 1% hold {share:.0%}",
        "how much of the total length the largest gradients make up",
    )  # fmt: skip


def _duplicates(report: Findings) -> Verdict:
    made = report.likeness
    count = sum(len(group) - 1 for group in made.identical)
    near = sum(made.distinct(group) - 1 for group in made.alike)
    if not made.compared:
        text = "inputs could not be compared; " + _near(near, "")
        return Verdict("duplicates", "note", "Duplicates unknown", text)
    text = "samples with the same inputs as an earlier one" if count else "no two inputs are equal"
    if made.conflicting:
        text += f", {len(made.conflicting):,} groups with different labels"
    return Verdict(
        "duplicates", "note" if count else "good",
        f"{count:,} duplicate{'' if count == 1 else 's'}",
        f"{text}; {_near(near, 'more ' if count else '')}",
    )  # fmt: skip


def _near(count: int, more: str) -> str:
    if not count:
        return f"no {'other ' if more else ''}two gradients nearly agree"
    return f"{count:,} {more}{'has' if count == 1 else 'have'} nearly the gradient of another"


def _nonfinite(report: Findings) -> Verdict:
    count = len(report.nonfinite)
    text = "NaN or infinite loss or gradient; left out of everything else"
    return Verdict(
        "nonfinite", "bad" if count else "good", f"{count:,} not finite",
        text if count else "every loss and every gradient is finite",
    )  # fmt: skip


def title(report: Findings) -> str:
    """What was looked at."""
    batches = "1 batch" if report.batches == 1 else f"{report.batches:,} batches"
    return f"{report.model_name}, {report.count:,} samples in {batches}"


def id_head(report: Findings) -> str:
    """What the column with ids is called: a position is no id."""
    return "id" if report.ids_given else "position"


def remarks(report: Findings) -> list[str]:
    """What one must know before reading on."""
    found = []
    made = report.collected
    if report.interrupted:
        found.append("Interrupted: this report covers only the samples seen until then.")
    if not report.ids_given and not report.in_order:
        why = f" ({made.ids.order.why})" if made.ids.order.why else ""
        found.append(
            "No ids were given: pass-7 is the eighth sample of this pass, not index 7 of the data "
            f'set{why}. ids="idx" takes a field of the batch.'
        )
    given = made.ids.available
    whole = not (report.interrupted or made.limited)
    if given is not None and given != report.count and whole:
        found.append(f"{given:,} ids were given for {report.count:,} samples.")
    if made.dropout:
        found.append(
            "Dropout is active, so gradients differ from run to run: model.eval() stops it."
        )
    if not bool(report.finite.any()):
        found.append("No sample has a finite gradient: nothing can be said of them.")
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
        f"gradient moves by {float(curve.bias[at]):.0%} of its length."
    )


def noise_words(report: Findings) -> str:
    """The noise scale in a sentence."""
    noise = report.noise
    if noise is None:
        return "It needs two batches of at least two samples."
    if noise.value is None or noise.low is None or noise.high is None:
        return (
            f"Over {noise.batches} batches the mean gradient cannot be told from zero "
            f"(tr Σ = {number(noise.trace)}): the noise scale is larger than these data can show."
        )
    return (
        f"tr Σ / |G|² = {number(noise.value)} over {noise.batches} batches (between "
        f"{number(noise.low)} and {number(noise.high)}): averaging over many more samples per step "
        "than this gains little, far fewer makes the gradient mostly noise."
    )
