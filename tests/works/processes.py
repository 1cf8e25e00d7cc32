"""Several processes: DDP and fully_shard, with gloo on this machine."""

from __future__ import annotations

import functools
import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

import persample

from .base import Cases, Missing, Outcome, Wrong
from .ranks import ALONE, PAIRS, REFUSED, SCENARIOS, work

importlib.import_module(f"{__package__}.ranks_with_grad")  # adds its scenarios
CASES = Cases("Several processes")
SECONDS = 300


@functools.cache
def together(world: int) -> list[dict[str, Any]]:
    """Run every scenario in ``world`` processes: what each of them found, by scenario."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise Missing("gloo")
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=work, args=(rank, world, folder), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(SECONDS)
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        files = [Path(folder) / f"{rank}.json" for rank in range(world)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def tried(name: str, *worlds: int) -> Outcome:
    """The worst of all processes; refused if all of them refuse."""
    worst, refused = 0.0, []
    for world in worlds:
        found = [result.get(name, {"crash": "it never finished"}) for result in together(world)]
        crashes = [f["crash"] for f in found if "crash" in f]
        if crashes:
            raise RuntimeError(f"{name} on {world} processes: {' / '.join(crashes)}")
        said = [f["refused"] for f in found if "refused" in f]
        if said and len(said) < world:
            raise Wrong(f"{name}: refused in {len(said)} of {world} processes")
        refused += said
        worst = max([worst, *(f["error"] for f in found if "error" in f)])
    if refused:
        raise persample.UsageError(refused[0]["what"], fix=refused[0]["fix"])
    return Outcome(worst, SCENARIOS[name].tolerance)


for _name, _scenario in SCENARIOS.items():
    _worlds = (2,) if _name in PAIRS else (1,) if _name in ALONE else (1, 2, 4)
    _add = CASES.refused if _name in REFUSED else CASES.right
    _add(f"{_scenario.pattern} ({', '.join(map(str, _worlds))})", _name, *_worlds)(tried)
