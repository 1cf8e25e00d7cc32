"""Measured noise: variance of what is released minus the sum, and faults in it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from persample import private

from .check import Row
from .test_noise import Louder, PerPart, ratio
from .test_parallel import WORLDS, found

TRIALS = 50
LIMIT = 5.0  # standard deviations of χ²


class Quieter(Louder):
    """Less noise than stated."""

    factor = 1.5**-0.5


FAULTS: dict[str, type[private.Training]] = {
    "as stated": private.Training,
    "variance 1.5 times too large": Louder,
    "variance 1.5 times too small": Quieter,
    "noise in every micro-batch": PerPart,
}


def judged(name: str, deviations: list[float], *, wrong: bool) -> Row:
    """Convict nobody who is right, and everybody who is not."""
    convicted = sum(abs(d) > LIMIT for d in deviations)
    mean = sum(deviations) / len(deviations)
    return Row(
        proof=f"noise: {name}",
        cases=len(deviations),
        found=f"{convicted} convicted, mean {mean:+.2f} sd of χ²",
        demanded="all convicted" if wrong else "none convicted",
        ok=convicted == (len(deviations) if wrong else 0),
    )


def proofs() -> Iterator[Row]:
    """Trainings with several micro-batches, then with several processes."""
    torch.set_num_threads(1)
    for parts in (1, 3, 7):
        for name, kind in FAULTS.items():
            deviations = [ratio(parts, kind) for _ in range(TRIALS)]
            yield judged(
                f"{parts} micro-batches, {name}", deviations, wrong=kind is not private.Training
            )
    for world in WORLDS:
        for name, key in (("as stated", "noise"), ("noise of every process", "noise_per_rank")):
            measured = [(r["ratio"] - 1) / math.sqrt(2 / r["count"]) for r in found(key, world)]
            yield judged(f"{world} processes, {name}", measured, wrong=key != "noise")
