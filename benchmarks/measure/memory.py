"""Peak memory of one step, every (model, peer, question) in a process of its own.

    python -m benchmarks.measure.memory MODEL RESULT.json [options]; the benchmark starts it.

A process builds the model and forks once per cell. The child runs the step once (libraries
initialise themselves), frees everything, gives free memory back to the system, resets the kernel's
peak counter, and runs the step again: the figure is the highest resident size during that step
minus the resident size before it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..models import MODELS
from ..models.case import Case
from ..peers import PEERS
from .process import limit, message, settle

LIBRARIES = (
    "opacus.grad_sample", "opacus.validators", "backpack.extensions", "opake.dpsgd.clipping",
    "dattri_llm",
)  # fmt: skip
TIMEOUT = 120.0  # seconds a cell may take


def status(field: str) -> int:
    """A size from /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def peak(step: Callable[[], Any]) -> tuple[int, str]:
    """Bytes that a step needs beyond what was resident before, and how that was measured."""
    settle()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before, method = status("VmRSS"), "VmHWM"
    except OSError:
        before, method = status("VmRSS"), "getrusage"
    kept = step()
    if method == "VmHWM":
        highest = status("VmHWM")
    else:
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    del kept
    return max(0, highest - before), method


def measured(case: Case, peer: str, question: str, threads: int) -> dict[str, Any]:
    """The result of one cell; runs in the child."""
    torch.set_num_threads(threads)
    try:
        steps = PEERS[peer](case, 1.0)
        if question not in steps:
            return {}
        steps[question]()
        size, method = peak(steps[question])
    except Exception as error:
        return {"state": "fails", "message": message(error)}
    return {"bytes": size, "method": method}


def forked(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run work in a child process and return its result; a dead or late child is a message."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], TIMEOUT)
    if not ready:
        os.kill(child, signal.SIGKILL)
    text = os.read(read, 1 << 16) if ready else b""
    os.close(read)
    _, code = os.waitpid(child, 0)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    if not ready:
        return {"state": "fails", "message": f"did not finish in {TIMEOUT:.0f} s"}
    return {"state": "fails", "message": f"process died with signal {os.WTERMSIG(code)}"}


def prepare() -> None:
    """Load what peers import at their first call, once for all children."""
    one = torch.func.grad(lambda w, x: (w * x).sum())
    torch.func.vmap(one, in_dims=(None, 0))(torch.ones(2), torch.ones(2, 2))
    for module in LIBRARIES:
        with contextlib.suppress(Exception):  # the peer's own row will say that it is missing
            importlib.import_module(module)


def measure(name: str, peers: list[str], threads: int) -> dict[str, Any]:
    """Every peer and question of a model."""
    started = time.perf_counter()
    torch.set_num_threads(1)  # a pool of threads would not survive the forks
    prepare()
    torch.manual_seed(0)
    case = MODELS[name]()
    found: dict[str, Any] = {}
    for peer in dict.fromkeys(["plain", *peers]):
        for question in ("step",) if peer == "plain" else ("grads", "norms", "clipped sum"):
            if (peer, question) == ("persample", "grads"):
                continue  # its buffers are there before the step: "persample, fresh" counts them
            result = forked(lambda p=peer, q=question: measured(case, p, q, threads))  # type: ignore[misc]
            if result:
                found.setdefault(peer, {})[question] = result
        sizes = [
            f"{q} {r['bytes'] >> 20} MiB" if "bytes" in r else f"{q} fails"
            for q, r in found.get(peer, {}).items()
        ]
        print(f"    {time.perf_counter() - started:6.1f} s  {peer}: {', '.join(sizes)}", flush=True)
    plain = found.pop("plain")["step"]
    base = max(1, plain["bytes"])
    for cells in found.values():
        for result in cells.values():
            if "bytes" in result:
                result["ratio"] = result["bytes"] / base
    return {"plain_bytes": plain["bytes"], "method": plain["method"], "peers": found}


def main() -> None:
    """Measure one model and write the result."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measure.memory", description=__doc__
    )
    parser.add_argument("model")
    parser.add_argument("result", type=Path)
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    limit()
    given.result.write_text(json.dumps(measure(given.model, given.peers, given.threads)))


if __name__ == "__main__":
    main()
