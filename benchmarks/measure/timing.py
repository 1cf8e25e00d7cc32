"""Time of one model in one process: check every answer, then interleaved rounds.

    python -m benchmarks.measure.timing MODEL RESULT.json [options]; the benchmark starts it.

Each round runs the plain step and every cell (peer, question) once, in an order drawn anew; a
cell's figure is its time divided by the plain step's time of the same round. A second plain step
in every round is the control: its figure should be one. An answer is compared with the one-sample
loop before it is timed. A cell far slower than the plain step is run once and left out; one far
behind the fastest answer to its question is left out after the first rounds, so that more rounds
are left for those that compete.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..models import MODELS
from ..models.case import Case
from ..peers import PEERS
from ..peers.answers import DISPUTED, EXACT, TOLERANCE, Referee, drawn, widened
from .process import limit, message, settle

SLOW, PATIENCE = 20.0, 0.5  # left out of the rounds: slower than both (ratio, seconds)
BEHIND = 1.5  # left out of later rounds: slower than the fastest by this
CONTROL = "plain again"
LEAST = 2  # rounds, however long they take
REPEAT = 0.015  # a step shorter than this many seconds is repeated within a round


@dataclass
class Cell:
    """One peer's answer to one question."""

    peer: str
    question: str
    step: Callable[[], Any]
    found: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    first: float = 0.0  # seconds of the run that was judged
    timed: bool = True


def clock(
    step: Callable[[], Any], repeat: int = 1, timer: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one step."""
    start = timer()
    for _ in range(repeat):
        step()
    return (timer() - start) / repeat


def built(case: Case, name: str, bound: float) -> tuple[dict[str, Callable[[], Any]], str]:
    """A peer's steps, or why it has none."""
    try:
        return PEERS[name](case, bound), ""
    except Exception as error:
        return {}, message(error)


def released() -> None:
    """The step of a cell that failed."""


def judged(cell: Cell, case: Case, referee: Referee) -> None:
    """Run a cell once and compare its answer with the truth."""
    try:
        start = time.perf_counter()
        answer = cell.step()
        cell.first = time.perf_counter() - start
        if answer is None:
            return
        error = referee.error(cell.question, answer)
    except Exception as problem:
        cell.found, cell.timed = {"state": "fails", "message": message(problem)}, False
        return
    cell.found = {"state": "right" if error <= TOLERANCE else "wrong", "error": error}
    if TOLERANCE < error <= DISPUTED:
        del answer
        cell.found["error in float64"] = exact = second_opinion(cell, case, referee.bound)
        cell.found["state"] = "right" if exact <= EXACT else "wrong"
    if cell.found["state"] == "wrong":
        cell.found["message"] = f"off by {error:.2g} of the gradient"


def second_opinion(cell: Cell, case: Case, bound: float) -> float:
    """The error of the same peer on the same batch in float64."""
    try:
        wide = widened(case)
        answer = PEERS[cell.peer](wide, bound)[cell.question]()
        return Referee(wide, bound).error(cell.question, answer)
    except Exception:
        return math.inf


def report(text: str, started: float) -> None:
    """One line of progress."""
    print(f"    {time.perf_counter() - started:6.1f} s  {text}", flush=True)


def cells_of(
    case: Case, referee: Referee, peers: list[str], current: Path, started: float
) -> tuple[list[Cell], dict[str, Any]]:
    """Every cell, judged; and what peers that could not even be built said."""
    cells, broken = [], {}
    for name in peers:
        current.write_text(name)
        steps, problem = built(case, name, referee.bound)
        if problem:
            broken[name] = {"all": {"state": "fails", "message": problem}}
        mine = []
        for question in list(steps):
            mine.append(Cell(name, question, steps[question]))
            judged(mine[-1], case, referee)
            if not mine[-1].timed:  # what a failed step left must not reach the next question
                mine[-1].step = released  # nor keep its copy of the model
                steps = built(case, name, referee.bound)[0]
            gc.collect()
        states = [f"{c.question} {c.found.get('state', 'not judged')}" for c in mine]
        report(f"{name}: {', '.join(states) or problem}", started)
        cells += mine
    current.unlink(missing_ok=True)
    return cells, broken


def rounds_of(
    plain: Cell,
    cells: list[Cell],
    rounds: int,
    seconds: float,
    started: float,
    timer: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[Cell, float]]:
    """The control and the processor share, after each of the interleaved rounds.

    Until there are enough rounds, or until those after the first two have used their time up.
    """
    plain.step()
    base = min(clock(plain.step, timer=timer) for _ in range(2))
    repeat = max(1, math.ceil(REPEAT / base))
    half = max(1, repeat // 2)
    for cell in cells:
        if cell.timed and cell.first > SLOW * base and cell.first > PATIENCE:
            again = clock(cell.step, timer=timer)  # the first run also initialises the library
            if again > SLOW * base and again > PATIENCE:
                cell.timed = False
                cell.found |= {"median": again / base, "note": "too slow for the rounds, run once"}
    control = Cell(CONTROL, "step", plain.step)
    everyone = [plain, control, *(cell for cell in cells if cell.timed)]
    order = random.Random(0)  # who comes after whom must not decide
    begun, used = time.perf_counter(), time.process_time()
    left = seconds
    for done in range(rounds):
        if done == LEAST:
            everyone = [plain, control, *competing(everyone[2:])]
        if done >= LEAST and left < 0:
            break
        start = time.perf_counter()
        for cell in order.sample(everyone, len(everyone)):
            try:
                times = repeat if cell.step is plain.step else half
                cell.seconds.append(clock(cell.step, times, timer))
            except Exception as problem:  # memory, mostly: it was right when it was judged
                if cell in (plain, control):
                    raise
                cell.found |= {"state": "fails", "message": message(problem)}
                cell.seconds, cell.step = [], released
                everyone.remove(cell)
        left -= time.perf_counter() - start if done >= LEAST else 0.0
        report(f"round {done + 1}", started)
        share = (time.process_time() - used) / (time.perf_counter() - begun)
        yield control, share


def competing(cells: list[Cell]) -> list[Cell]:
    """Those that are not far behind the fastest right answer to their question."""
    best: dict[str, float] = {}
    for cell in cells:
        if cell.found.get("state") == "wrong":
            continue
        best[cell.question] = min(best.get(cell.question, math.inf), *cell.seconds)
    return [
        cell for cell in cells if min(cell.seconds) <= BEHIND * best.get(cell.question, math.inf)
    ]


def summary(cell: Cell, base: list[float]) -> dict[str, Any]:
    """Median and quartiles of the ratios to plain."""
    if not cell.seconds:
        return cell.found
    ratios = [mine / plain for mine, plain in zip(cell.seconds, base, strict=False)]
    if len(ratios) < LEAST:
        return {**cell.found, "median": ratios[0]}
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {**cell.found, "median": middle, "quartiles": [low, high]}


def measure(
    name: str, peers: list[str], *, rounds: int, seconds: float, current: Path
) -> Iterator[dict[str, Any]]:
    """The result of one model: when it is judged, then after every round."""
    started = time.perf_counter()
    case, referee, seed = drawn(MODELS[name])
    cells, broken = cells_of(case, referee, [p for p in peers if p != "plain"], current, started)
    del referee
    settle()
    plain = Cell("plain", "step", PEERS["plain"](case, 1.0)["step"])
    parameters = list(case[0].parameters())

    def result() -> dict[str, Any]:
        found = dict(broken)
        for cell in cells:
            found[cell.peer] = {
                **found.get(cell.peer, {}),
                cell.question: summary(cell, plain.seconds),
            }
        return {
            "n": len(case[1]),
            "seed": seed,
            "parameters": sum(p.numel() for p in parameters),
            "trained": sum(p.numel() for p in parameters if p.requires_grad),
            "rounds": len(plain.seconds),
            "peers": found,
        }

    yield result()
    for control, share in rounds_of(plain, cells, rounds, seconds, started):
        yield {
            **result(),
            "plain_ms": statistics.median(plain.seconds) * 1e3,
            "control": summary(control, plain.seconds),
            "processor share": share,
        }


def main() -> None:
    """Measure one model and write the result."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measure.timing", description=__doc__
    )
    parser.add_argument("model")
    parser.add_argument("result", type=Path)
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    limit()
    current = given.result.with_suffix(".current")
    for found in measure(
        given.model, given.peers, rounds=given.rounds, seconds=given.seconds, current=current
    ):
        given.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
