"""Small models that try to make persample silently wrong: exact or refused, never anything else.

python -m tests.attacks                all, prints failures and totals
python -m tests.attacks einsum pad     cases whose name contains a word
python -m tests.attacks -v             every case
python -m tests.attacks --loop         record with unproven="loop"
python -m tests.attacks --verify       record with verify=True
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from . import (
    attacks_axes,
    attacks_graph,
    attacks_losses,
    attacks_memory,
    attacks_modules,
    attacks_params,
    attacks_scripts,
)
from .attacks_base import Case, Script, Verdict, judge, judge_script

PARTS = (
    attacks_axes,
    attacks_memory,
    attacks_params,
    attacks_modules,
    attacks_losses,
    attacks_graph,
)


def cases() -> Iterator[Case]:
    """Every (name, model, batch, loss_fn, expectation)."""
    return chain.from_iterable(part.cases() for part in PARTS)


def scripts() -> Iterator[Script]:
    """Ways to use the interface that do not fit into one call of a loss function."""
    return attacks_scripts.scripts()


def verdicts(words: list[str], **options: Any) -> Iterator[tuple[Case | Script, Verdict]]:
    """The chosen cases, judged."""
    for item in chain(cases(), scripts()):
        if words and not any(word in item.name for word in words):
            continue
        if isinstance(item, Script):
            yield item, judge_script(item)
        else:
            yield item, judge(item, **options)


def main(arguments: list[str]) -> int:
    """Print a line per case that breaks the contract, and totals."""
    words = [a for a in arguments if not a.startswith("-")]
    options: dict[str, Any] = {"verify": True} if "--verify" in arguments else {}
    if "--loop" in arguments:
        options["unproven"] = "loop"
    totals: Counter[str] = Counter()
    broken = 0
    for item, verdict in verdicts(words, **options):
        totals[verdict.outcome] += 1
        bad = not verdict.fits(item.expectation)
        broken += bad
        if bad or words or "-v" in arguments:
            mark = "!" if bad else " "
            print(f"{mark} {verdict.outcome:8}{item.name} [{item.expectation}]  {verdict.detail}")
    print(dict(totals), f"{sum(totals.values())} cases, {broken} against expectation")
    return 1 if broken else 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
