"""A short run of every make target, two at a time: ``python -m tests.smoke [targets]``.

``tests/docs/test_commands.py`` compares this table with the Makefile. Nothing is written into the
working tree but below build/.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

# What stands for each target; the programs are those of its recipe, with less to do.
SHORT: dict[str, list[str]] = {
    "demo": ["persample inspect --batches 4 --html build/smoke.html"],
    "docs": ["mkdocs build --quiet --strict --site-dir build/smoke-site"],
    "release-check": ["python -m tests.release --build-only"],
    "ops": [
        "python -m tests.operators logaddexp",
        "python -m tests.operators logaddexp --ids",
        "python -m tests.modules PReLU",
    ],
    "fuzz": [
        "python -m tests.graphs 5", "python -m tests.graphs 5 --ids", "python -m tests.loops 5",
    ],
    "zoo": ["python -m tests.zoo distilbert"],
    "works": ["python -m tests.works channels_last"],
    "bench": [
        "python -m benchmarks mlp --parts time --peers persample --rounds 2 --out build/smoke",
        "python -m benchmarks.expanded_weights mlp --rounds 1",
    ],
    "bench-quick": ["python -m benchmarks --help"],
    "bench-tables": ["python -m benchmarks.tables --check"],
    "suspects": ["python -m benchmarks.suspects --help"],
    "private-check": ["python -m tests.private.check --help"],
    "gpu-check": ["python -m tests.gpu"],
    "third-party": ["python -m tests.third_party nothing-of-this-name"],
}  # fmt: skip
# What continuous integration runs as it is, and what would delete the environment.
WHOLE = {"test", "lint", "types", "test-browser", "smoke", "clean"}


def run(command: str) -> tuple[str, float, str]:
    """The command, its seconds, and what it printed if it failed."""
    program, *rest = command.split()
    start = time.perf_counter()
    done = subprocess.run(
        [str(BIN / program), *rest], cwd=ROOT, text=True, capture_output=True, check=False
    )
    said = f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}" if done.returncode else ""
    return command, time.perf_counter() - start, said


def main(targets: list[str]) -> int:
    """Run, print a line each, and fail if one failed."""
    (ROOT / "build").mkdir(exist_ok=True)
    commands = [c for target in targets or SHORT for c in SHORT[target]]
    failed = 0
    with ThreadPoolExecutor(2) as pool:
        for command, seconds, said in pool.map(run, commands):
            failed += bool(said)
            print(f"{'failed' if said else 'ok':<6} {seconds:6.1f} s  {command}\n{said}", end="")
            print(end="", flush=True)
    print(f"smoke: {len(commands)} commands, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
