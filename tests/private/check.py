"""The proofs of private training that take minutes.

python -m tests.private.check [accounting] [replay] [noise]

Each part prints a table, and writes it to benchmarks/results/private_<part>.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PARTS = ("accounting", "replay", "noise")
LIBRARIES = ("torch", "dp-accounting", "opacus", "transformers", "peft")


@dataclass(frozen=True)
class Row:
    """One proof: what was compared, how often, what was found, what was demanded."""

    proof: str
    cases: int
    found: str
    demanded: str
    ok: bool

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "FAILED"
        return f"{self.proof:<58} {self.cases:>6}  {self.found:<34} {self.demanded:<28} {verdict}"


def installed() -> dict[str, str]:
    """Versions of what was compared."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run(part: str) -> bool:
    """Print and store one part's rows; whether all of them hold."""
    rows: list[Row] = []
    proofs: Iterator[Row] = importlib.import_module(f"tests.private.check_{part}").proofs()
    print(f"{'proof':<58} {'cases':>6}  {'found':<34} demanded")
    for row in proofs:
        rows.append(row)
        print(row, flush=True)
    content = {
        "versions": installed(),
        "rows": [asdict(row) | {"ok": bool(row.ok)} for row in rows],
    }
    path = RESULTS / f"private_{part}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return all(row.ok for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    results = [run(part) for part in parser.parse_args().parts or PARTS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
