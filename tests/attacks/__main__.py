"""Small models that try to make persample silently wrong: exact or refused, never anything else.

python -m tests.attacks                all, prints failures and totals
python -m tests.attacks einsum pad     cases whose name contains a word
python -m tests.attacks -v             every case
python -m tests.attacks --loop         record with unproven="loop": mixing is answered natively
python -m tests.attacks --verify       record with verify=True
python -m tests.attacks --users        several rows of each sample, and a sample without rows
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from typing import Any

from .base import EITHER, REFUSED, USERS, Case, Script, Verdict, judge, judge_script

CASES = (
    "axes",
    "reshapes",
    "calls",
    "subscripts",
    "indexing",
    "writes",
    "params",
    "shared",
    "modules",
    "inputs",
    "losses",
    "tokens",
    "functions",
    "adjoints",
    "hooks",
    "backwards",
    "weights",
    "programs",
    "tricks",
    "hidden",
    "overwritten",
    "nobody",
    "zeros",
    "idioms",
    "coupled",
    "saved",
    "inner",
    "early",
)
SCRIPTS = (
    "scripts", "orders", "pieces", "stale", "choices", "nets", "overwritten", "afterwards",
    "nobody", "coupled", "ranked", "refills", "early",
)  # fmt: skip


def part(name: str) -> Any:
    """One file of attacks."""
    return import_module(f"{__package__}.{name}")


def cases() -> Iterator[Case]:
    """Every (name, model, batch, loss_fn, expectation)."""
    return chain.from_iterable(part(name).cases() for name in CASES)


def scripts() -> Iterator[Script]:
    """Ways to use the interface that do not fit into one call of a loss function."""
    return chain.from_iterable(part(name).scripts() for name in SCRIPTS)


def verdicts(words: list[str], **options: Any) -> Iterator[tuple[Case | Script, Verdict]]:
    """The chosen cases, judged."""
    for item in chain(cases(), scripts()):
        if words and not any(word in item.name for word in words):
            continue
        if isinstance(item, Script):
            yield item, judge_script(item)
        else:
            verdict = judge(item, **options)
            if verdict.outcome != "invalid" or "sample_ids" not in options:
                yield item, verdict


def allowed(item: Case | Script, options: dict[str, Any]) -> str:
    """The expectation; a loop may answer what mixes, with the gradient of each loss."""
    if "sample_ids" in options and isinstance(item, Case):
        return EITHER
    answered = options.get("unproven") == "loop" and isinstance(item, Case)
    return EITHER if answered and item.expectation == REFUSED else item.expectation


def main(arguments: list[str]) -> int:
    """Print a line per case that breaks the contract, and totals."""
    words = [a for a in arguments if not a.startswith("-")]
    options: dict[str, Any] = {"verify": True} if "--verify" in arguments else {}
    if "--loop" in arguments:
        options["unproven"] = "loop"
    if "--users" in arguments:
        options |= {"n": 3, "sample_ids": USERS}
    totals: Counter[str] = Counter()
    broken = 0
    for item, verdict in verdicts(words, **options):
        totals[verdict.outcome] += 1
        expectation = allowed(item, options)
        bad = not verdict.fits(expectation)
        broken += bad
        if bad or words or "-v" in arguments:
            mark = "!" if bad else " "
            print(f"{mark} {verdict.outcome:8}{item.name} [{expectation}]  {verdict.detail}")
    print(dict(totals), f"{sum(totals.values())} cases, {broken} against expectation")
    return 1 if broken else 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
