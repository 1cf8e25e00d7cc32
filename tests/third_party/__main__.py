"""Judge every model: ``python -m tests.third_party [package ...] [--write]``.

Without words, all packages that are installed; ``--write`` keeps the counts in
benchmarks/results/third_party.json.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from .judge import FIXED, KINDS, Verdict, judge
from .subject import Row, Table

DOMAINS = (
    "graphs", "spiking", "tabular", "flows", "sequences", "vision", "generative", "science",
    "policies", "series", "pooling", "attention", "layers", "memories",
    "recommenders", "signals", "ensembles", "graph_layers", "varieties",
)  # fmt: skip
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "third_party.json"


def tables() -> list[Table]:
    """Every domain's table."""
    return [importlib.import_module(f".{name}", __package__).TABLE for name in DOMAINS]


def installed(row: Row) -> bool:
    """Whether a row's package can be found."""
    return importlib.util.find_spec(row.module.split(".")[0]) is not None


def expect_torchvision() -> None:
    """Import torchvision; without its compiled part it does if two of its operators have names."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for module in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[module]
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        importlib.import_module("torchvision")


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def entry(row: Row, domain: str, verdict: Verdict) -> dict[str, Any]:
    """A row as it is kept."""
    found: dict[str, Any] = {"domain": domain, "package": row.package, "model": row.name}
    found |= {"outcome": verdict.kind, "detail": verdict.detail}
    if verdict.refusal is not None:
        found |= {"step": verdict.step, "refusal": verdict.refusal}
    return found


def summary(entries: list[dict[str, Any]], missing: list[str]) -> dict[str, Any]:
    """Counts over all and by package, versions, and what was not judged exact."""
    counts = Counter(e["outcome"] for e in entries)
    by_package: dict[str, Any] = {}
    for package in sorted({e["package"] for e in entries}, key=str.lower):
        found = Counter(e["outcome"] for e in entries if e["package"] == package)
        by_package[package] = {
            "version": version_of(package),
            **{k: found[k] for k in KINDS if found[k]},
        }
    judged = sum(counts[k] for k in KINDS if k != "skipped")
    separable = judged - counts["refused by right"] - counts["stated limit"]
    return {
        "torch": torch.__version__,
        "packages": len(by_package),
        "models": judged,
        "counts": {k: counts[k] for k in KINDS},
        "exact of separable": _share(counts["exact"], separable),
        "exact, or exact by the error's own fix": _share(
            counts["exact"] + counts[FIXED], separable
        ),
        "by package": by_package,
        "not installed": missing,
        "rows": entries,
    }


def _share(count: int, of: int) -> float | None:
    return round(count / of, 4) if of else None


def main(arguments: list[str]) -> int:
    """Judge, print a line per model, and the counts."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    expect_torchvision()
    words = [a.lower() for a in arguments if not a.startswith("-")]
    entries, missing = [], set()
    for table in tables():
        for row in table.rows:
            title = f"{table.domain} {row.package} {row.name}"
            if words and not any(word in title.lower() for word in words):
                continue
            if not installed(row):
                missing.add(row.package)
                continue
            start = time.perf_counter()
            verdict = judge(row)
            entries.append(entry(row, table.domain, verdict))
            spent = time.perf_counter() - start
            print(f"{verdict.kind:<18} {title:<60} {spent:5.1f}s  {verdict.detail}", flush=True)
            for key, text in (verdict.refusal or {}).items():
                print(f"      {key}: {text}", flush=True)
            gc.collect()
    found = summary(entries, sorted(missing))
    for package in found["not installed"]:
        print(f"{package} is not installed: skipped")
    told = {k: found[k] for k in found if k not in ("by package", "not installed", "rows")}
    print(told)
    if "--write" in arguments:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(found["counts"][k] for k in ("wrong", "crash")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
