"""The statement to publish: unit, relation, mechanism, constants, accountant, what is not counted.

Its lines follow the reporting lists of "How to DP-fy ML" (arXiv 2303.00654) and NIST SP 800-226.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import replace

from . import accounting
from .constants import Constants

_CLIPPING = {
    "flat": "g becomes g · min(1, C / ‖g‖)",
    "automatic": "g becomes g · C / (‖g‖ + 0.01)",
    "per_layer": "the part of g that belongs to parameter l is clipped to C_l, √ΣC_l² = C",
}


def text(plan: Constants, *, steps: int | None = None) -> str:
    """The statement of a plan, or of its first ``steps`` updates."""
    done = plan.steps if steps is None else steps
    lines = {
        "guarantee": _guarantee(plan, done),
        "unit": _unit(plan),
        "relation": _relation(plan),
        "sampling": _sampling(plan),
        "clipping": _clipping(plan),
        "mechanism": _mechanism(plan),
        "updates": f"{done:,}" + (f" of {plan.steps:,} planned" if done != plan.steps else ""),
        "accounting": _accounting(plan, done),
        "released": "the model after every update, and the constants above; losses, norms, clip "
        "rates and accuracy on the training data are not covered",
        "not counted": "tuning runs, other trainings on these data, and anything chosen by "
        "looking at them; name the data of pretraining and preprocessing beside this statement",
        "limits": "noise is drawn in floating point; on accelerators the generator is not "
        "cryptographic",
    }
    rows = [_row(label, line) for label, line in lines.items()]
    return "\n".join(["Differential privacy of this training", *rows])


def _row(label: str, line: str) -> str:
    return textwrap.fill(
        line, width=98, initial_indent=f"  {label:<12}", subsequent_indent=" " * 14
    )


def _guarantee(plan: Constants, steps: int) -> str:
    spent = plan.epsilon(steps)
    if math.isinf(spent):
        return f"none: no finite epsilon can be shown at delta = {plan.delta:g}"
    target = plan.target_epsilon
    asked = f" (target {target:g})" if target is not None else ""
    return f"epsilon = {round_up(spent)}{asked} at delta = {plan.delta:g}"


def round_up(value: float) -> str:
    """Four digits, rounded up: a published ε is never less than the computed one."""
    if value <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.4g}"


def _unit(plan: Constants) -> str:
    return "one sample" if plan.unit == "sample" else "one user: all samples of that user together"


def _relation(plan: Constants) -> str:
    if plan.size is None:
        return (
            f"add-or-remove: data sets that differ by the presence of one {plan.unit}, provided "
            "that sample rate and divisor were chosen without knowing the number of "
            f"{plan.unit}s"
        )
    return (
        f"zero-out: data sets that differ in one {plan.unit}, which contributes zero in one of "
        f"them; the number of {plan.unit}s, {plan.size:,}, is public"
    )


def _sampling(plan: Constants) -> str:
    if plan.bands > 1:
        found = (
            f"each {plan.unit} falls into one of {plan.bands} groups by an independent coin; each "
            f"update draws from one group in turn, each {plan.unit} in it independently with "
            f"probability {plan.group_rate:.6g}"
        )
    else:
        found = (
            f"Poisson: each {plan.unit} is in each batch independently with probability "
            f"{plan.sample_rate:.6g}"
        )
    if plan.batch_size is not None:
        found += f" (expected batch {plan.batch_size:,.6g})"
    if plan.cap is not None:
        found += f"; of more than {plan.cap:,} a uniform subset of {plan.cap:,} is kept"
    return found


def _clipping(plan: Constants) -> str:
    whose = "one sample" if plan.unit == "sample" else "all samples of one user, added up"
    return (
        f"C = {plan.max_norm:g}; for the gradient g of {whose}: {_CLIPPING[plan.clipping]}; "
        "zero if g is not finite"
    )


def _mechanism(plan: Constants) -> str:
    found = (
        f"Gaussian: noise multiplier {plan.noise_multiplier:.6g}, standard deviation "
        f"{plan.noise_std:.6g}, once per update on every trainable parameter"
    )
    if plan.bands > 1:
        found += (
            f"; correlated over {plan.bands} updates by the banded square root (BandMF), whose "
            f"largest column norm is {plan.column_norm:.6g}"
        )
    divisor = "no divisor given: for accounting only" if plan.divisor is None else None
    return f"{found}; {divisor or f'the noisy sum is divided by {plan.divisor:g}'}"


def _accounting(plan: Constants, steps: int) -> str:
    mechanism = plan.mechanism()
    found = (
        f"privacy loss distributions (dp-accounting {accounting.version()}, rounded up), "
        f"{mechanism.count(steps):,} × {accounting.described(mechanism)}"
    )
    if plan.cap is not None:
        free = accounting.epsilon(replace(mechanism, cap=None), steps=steps, delta=plan.delta)
        found += f"; without the cap epsilon would be {round_up(free)}"
    return found
