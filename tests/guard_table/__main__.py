"""Count guards over the batteries and write benchmarks/results/guards.json.

    python -m tests.guard_table              all batteries; a few minutes
    python -m tests.guard_table works loops  only these, printed and not written

For each guard: in how many programs it had something to look at, how many of them it refused, and
what those programs do with this guard alone switched off: give wrong numbers (or right ones of
samples that influence each other), are refused by another guard, give right numbers, or something
else: they fail with an error of torch's, or are answered where nobody judges the answer.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import transformers

from benchmarks.measure.results import RESULTS
from persample import PersampleError

from .listed import GUARDS, OTHER, guard_of, switched_off
from .notes import instruments, noting
from .programs import ANSWERED, EXACT, FAILED, REFUSED, WRONG, Program, programs

WITHOUT = {
    WRONG: "wrong without it",
    REFUSED: "refused by another",
    EXACT: "right without it",
    ANSWERED: "something else",
    FAILED: "something else",
}
COLUMNS = ("looked", "refused", *dict.fromkeys(WITHOUT.values()))
CHECKS = {guard.name: guard.checks for guard in GUARDS}
CAN_BE_OFF = {guard.name for guard in GUARDS if guard.off}


def outcome(run: Any) -> str:
    """How a program came out; errors that escape are refusals or failures."""
    try:
        return str(run())
    except PersampleError:
        return REFUSED
    except Exception:
        return FAILED


def count(chosen: Iterable[Program]) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Counts by guard, and programs by battery."""
    found: dict[str, Counter[str]] = {g: Counter() for g in (*CHECKS, OTHER)}
    seen: Counter[str] = Counter()
    with instruments(CHECKS):
        for program in chosen:
            seen[program.battery] += 1
            with noting() as notes:
                first = outcome(program.runs[0])
            for name in notes.looked:
                found[name]["looked"] += 1
            if first != REFUSED:
                continue
            guard = guard_of(notes)
            notes.built.clear()  # their tracebacks hold tensors
            found[guard]["refused"] += 1
            if guard in CAN_BE_OFF:
                with noting() as notes, switched_off(guard):
                    second = outcome(program.runs[1])
                found[guard][WITHOUT[second]] += 1
                if second == REFUSED:
                    found[guard][f"by {guard_of(notes)}"] += 1
                notes.built.clear()
    return found, seen


def main(words: list[str]) -> None:
    """Count, print, and write the results if nothing was left out."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    chosen = (p for p in programs() if not words or any(word in p.battery for word in words))
    found, seen = count(chosen)
    for name, counts in found.items():
        print(f"{name:84}" + "".join(f"{counts[column]:>7}" for column in COLUMNS))
    print(dict(seen))
    if not words:
        files = {guard.name: guard.file for guard in GUARDS} | {OTHER: ""}
        rows = {
            name: {"file": files[name], "can be off": name in CAN_BE_OFF}
            | {column: counts[column] for column in COLUMNS}
            | {"then refused by": {k[3:]: v for k, v in counts.items() if k.startswith("by ")}}
            for name, counts in found.items()
        }
        text = json.dumps({"programs": dict(seen), "guards": rows}, indent=1, ensure_ascii=False)
        (RESULTS / "guards.json").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
