"""Steps of one and two processes: plain DDP, and clipped sums with and without overlap.

    python -m benchmarks.measure.processes RESULT.json [--quick]; the benchmark starts it.

Every process takes the model's whole batch, as when processes are added to train faster. A round
runs each step once in every process, begun together; a figure is the median over rounds of its time
divided by the plain step's of the same round, on the first process. The plain step under DDP
reduces gradients while backward computes them. One thread per process, wall time: processes that
share a core with other work make every figure meaningless.
"""

from __future__ import annotations

import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

import persample

from ..models import MODELS
from ..models.case import Case
from .process import run

NAMES = ("gpt", "vit")
WORLDS = (1, 2)
ROUNDS = 9


def steps(case: Case) -> dict[str, Callable[[], None]]:
    """One training step without its optimizer, three ways."""
    net, x, y, loss = case
    model = DistributedDataParallel(net)

    def plain() -> None:
        loss(model(x), y).sum().backward()

    def recorded() -> persample.Tape:
        with persample.record(model) as tape:
            tape.backward(loss(model(x), y))
        return tape

    def clipped() -> None:
        tape = recorded()
        tape.set_grad(tape.clipped_sum(1.0))

    return {
        "plain": plain,
        "clipped sum, then reduced": clipped,
        "clipped sum, overlapped": lambda: recorded().set_clipped_grad(1.0),
    }


def work(rank: int, world: int, name: str, rounds: int, folder: str) -> None:
    """What every process runs; the first writes the times."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world,
        timeout=datetime.timedelta(minutes=5),
    )  # fmt: skip
    torch.manual_seed(0)
    case = MODELS[name]()
    each = steps(case)
    times: dict[str, list[float]] = {key: [] for key in each}
    for done in range(rounds + 1):
        for key, step in each.items():
            case[0].zero_grad(set_to_none=True)
            dist.barrier()
            start = time.perf_counter()
            step()
            if done:  # the first round warms up
                times[key].append(time.perf_counter() - start)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def measure_model(name: str, world: int, rounds: int) -> dict[str, float]:
    """Ratios to the plain step of as many processes, and samples per second of all."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (world, name, rounds, folder), nprocs=world)  # type: ignore[no-untyped-call]
        times = json.loads((Path(folder) / "times.json").read_text())
    base = times.pop("plain")
    found = {"plain_ms": statistics.median(base) * 1e3}
    found["samples per second"] = world * len(MODELS[name]()[1]) / statistics.median(base)
    for key, values in times.items():
        found[key] = statistics.median(a / b for a, b in zip(values, base, strict=True))
    return found


def measure(quick: bool) -> dict[str, Any]:
    """Every model, one process and two."""
    found: dict[str, Any] = {}
    for name in ("tiny",) if quick else NAMES:
        for world in WORLDS:
            found.setdefault(name, {})[str(world)] = cell = measure_model(
                name, world, 2 if quick else ROUNDS
            )
            text = "  ".join(f"{key} {value:.2f}" for key, value in cell.items())
            print(f"    {name} on {world}: {text}", flush=True)
    return found


if __name__ == "__main__":
    run("processes", __doc__, measure)
