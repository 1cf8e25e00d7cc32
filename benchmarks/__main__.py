"""Measure persample and its peers: time, memory, growth, overhead, and parts without peers.

    python -m benchmarks [models ...] [--parts time memory scaling overhead small budgets processes]
                         [--peers ...] [--threads 1] [--heap warm|default|both|mapped]
                         [--rounds 15] [--quick]

Results go to benchmarks/results (``--quick``: to build/bench-quick), one entry per model, so that a
part of them can be measured again; ``python -m benchmarks.tables`` makes tables and plots of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .measure.results import HEAPS, RESULTS, ROOT, WARM, environment, regime, save
from .models import ALL, MODELS, QUICK
from .peers import PEERS

PARTS = ("time", "memory", "scaling", "overhead", "small", "budgets", "processes")
FILES = {part: part for part in PARTS} | {"time": "peers"}
WEIGHTS = {"scaling": 3.0}  # beside one, for the ETA
HEAVY = {"gpt2_small": 4.0, "resnet18": 2.0, "vit": 1.5, "text": 1.5}


@dataclass(frozen=True)
class Job:
    """One child process: a part, of a model where it has one, under one allocator."""

    part: str
    model: str
    heap: str

    @property
    def weight(self) -> float:
        """How long it takes, roughly and relatively."""
        return WEIGHTS.get(self.part, 1.0) * HEAVY.get(self.model, 1.0)


def jobs_of(given: argparse.Namespace) -> Iterator[Job]:
    """What was asked for, in the order of measuring."""
    heaps = ("warm", "default") if given.heap == "both" else (given.heap,)
    for part in given.parts:
        if part == "time":
            yield from (Job(part, model, heap) for heap in heaps for model in given.models)
        elif part == "memory":  # what is freed must not be counted
            models = given.models[:1] if given.quick else given.models
            heap = "default" if given.heap == "default" else "mapped"
            yield from (Job(part, model, heap) for model in models)
        elif part == "scaling":
            yield Job(part, "", "default")
        else:
            yield Job(part, "", heaps[0])


def arguments(job: Job, given: argparse.Namespace, peers: list[str], result: Path) -> list[str]:
    """The child's command."""
    module = {"time": "timing"}.get(job.part, job.part)
    command = [sys.executable, "-m", f"benchmarks.measure.{module}"]
    command += [job.model, str(result)] if job.model else [str(result)]
    command += ["--threads", str(given.threads)]
    if job.part in ("time", "memory"):
        command += ["--peers", *peers]
    if job.part == "time":
        command += ["--rounds", str(given.rounds), "--seconds", str(given.seconds)]
    if given.quick and not job.model:
        command.append("--quick")
    return command


def run(job: Job, given: argparse.Namespace) -> dict[str, Any]:
    """The result of a job. A peer that kills the process is left out of a second try, and named."""
    variables = {k: v for k, v in os.environ.items() if k not in WARM}
    variables |= HEAPS[job.heap]
    variables |= {"OMP_NUM_THREADS": str(given.threads)}
    peers, dead = list(given.peers), {}
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        while True:
            command = arguments(job, given, peers, result)
            code = subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode
            current = result.with_suffix(".current")
            if code == 0:
                found: dict[str, Any] = json.loads(result.read_text())
                if dead:
                    found["peers"] |= dead
                return found
            text = f"the process ended with code {code}"
            if not current.exists():  # not while a peer was judged: what was saved so far stands
                found = json.loads(result.read_text()) if result.exists() else {"peers": {}}
                return {**found, "peers": found["peers"] | dead, "message": text}
            culprit = current.read_text()
            current.unlink()
            dead[culprit] = {"all": {"state": "fails", "message": text}}
            peers = [name for name in peers if name != culprit]


def parsed() -> argparse.Namespace:
    """Command line, with quick mode's choices filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="*", metavar="model", help=", ".join(MODELS))
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heap", choices=(*HEAPS, "both"), default="warm")
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--seconds", type=float, help="for the rounds of one model, after the first two"
    )
    parser.add_argument("--quick", action="store_true", help="few models, few rounds")
    parser.add_argument("--out", type=Path, help="directory of the results")
    given = parser.parse_args()
    given.models = given.models or (QUICK if given.quick else ALL)
    if unknown := set(given.models) - set(MODELS):
        parser.error(f"no model is called {', '.join(sorted(unknown))}; there are {list(MODELS)}")
    given.rounds = given.rounds or (3 if given.quick else 15)
    given.seconds = given.seconds or (3.0 if given.quick else 25.0)
    given.out = given.out or (ROOT / "build" / "bench-quick" if given.quick else RESULTS)
    return given


def processor_seconds() -> float:
    """Processor time of the children so far: more than a little below wall time means company."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run every job and save what it found."""
    given = parsed()
    jobs = list(jobs_of(given))
    total, done, started = sum(job.weight for job in jobs), 0.0, time.monotonic()
    for index, job in enumerate(jobs, 1):
        spent, used = time.monotonic() - started, processor_seconds()
        left = f", about {spent / done * (total - done) / 60:.0f} min left" if done else ""
        print(f"[{index}/{len(jobs)}] {job.part} {job.model} ({job.heap} heap){left}", flush=True)
        found, key = run(job, given), regime(given.threads, job.heap)
        save(given.out, FILES[job.part], key, job.model or "all", found)
        where = environment(given.threads, job.heap)
        save(given.out, "environment", FILES[job.part], key, where)
        done += job.weight
        took, busy = time.monotonic() - started - spent, processor_seconds() - used
        print(f"    took {took:.0f} s, {busy:.0f} s of processor time", flush=True)
    print(f"{(time.monotonic() - started) / 60:.1f} min; results in {given.out}", flush=True)


if __name__ == "__main__":
    main()
