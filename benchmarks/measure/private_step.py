"""A whole private step as a ratio to a whole plain step: time, and peak memory.

    python -m benchmarks.private_step [models ...] [--rounds 15] [--out FILE]

Every step ends with an update by SGD. The plain one is forward, backward of the mean loss and
update. A private one clips every sample, adds noise, divides and updates; persample's also draws
the batch (at rate 1, so that all have the same samples), loads and counts it. Rounds are
interleaved, and times are those of the process, so that other programs decide little. Beside them
stand what a step cannot do without: the time inside torch's kernels (as if Python were free), and
that of the noise alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from persample import private
from persample.private.noise import Noise

from ..models import MODELS
from ..models.case import Case
from ..peers.libraries import opacus_twin
from .kernels import kernels
from .memory import forked, peak, prepare
from .process import limit, message
from .results import RESULTS, ROOT, WARM, environment
from .timing import Cell, rounds_of, summary

GOALS = {"lora": 1.10, "gpt": 1.25, "resnet18": 1.20, "bert": 1.30, "lstm": 2.0}
MEMORY_GOAL = 1.25
LR = 1e-6
Step = Callable[[], Any]


def plain(case: Case) -> Step:
    """Forward, backward, update."""
    net, x, y, loss = case
    optimizer = torch.optim.SGD(_trained(net), LR)

    def step() -> None:
        loss(net(x), y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(case: Case) -> Step:
    """One step of a training of very many."""
    net, x, y, loss = case
    plan = private.plan(
        noise_multiplier=1.0, delta=1e-5, size=len(x), batch_size=len(x), steps=10**6
    )
    training = private.Training(
        net, torch.optim.SGD(_trained(net), LR), (x, y), plan,
        lambda model, batch: loss(model(batch[0]), batch[1]), micro_batch=len(x), verify=False,
    )  # fmt: skip
    steps = iter(training)
    return lambda: next(steps)


def noise_alone(case: Case) -> Step:
    """The noise of one step, added to sums of all parameters."""
    sums = {name: torch.zeros_like(p) for name, p in case[0].named_parameters() if p.requires_grad}
    noise = Noise(secret=bytes(32), std=1.0)
    return lambda: noise.add(noise.draws, sums, 2.0)


class Criterion(nn.Module):
    """The case's loss as Opacus takes it: it sets ``reduction`` itself."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss, self.reduction = loss, "mean"

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        """One loss per sample, or their mean."""
        found = self.loss(out, y)
        return found if self.reduction == "none" else found.mean()


def opacus(case: Case, mode: str) -> Step:
    """PrivacyEngine with the whole batch, in one of its modes."""
    from opacus import PrivacyEngine

    net = opacus_twin(case).net
    _, x, y, loss = case
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
    made = PrivacyEngine().make_private(
        module=net, optimizer=torch.optim.SGD(_trained(net), LR), criterion=Criterion(loss),
        data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
        grad_sample_mode=mode,
    )  # fmt: skip
    wrapped, optimizer = made[0], made[1]
    criterion: Any = made[2] if mode == "ghost" else Criterion(loss)

    def step() -> None:
        criterion(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def opake(case: Case) -> Step:
    """``clipped_grad`` and ``gaussian_noise`` over one sample's loss, the whole batch at once."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.random import key

    net, xs, ys, loss = case
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), LR)

    def one(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(torch.func.functional_call(net, values, (x[None],)), y[None])[0]

    gradient, clipping = clipped_grad(one, clipping_norm=1.0, batch_argnums=(1, 2))
    noise, drawing = gaussian_noise(noise_multiplier=1.0, key=key(0))

    def step() -> None:
        nonlocal clipping, drawing
        values = {name: p.detach() for name, p in trained.items()}
        clipped, clipping = gradient(values, xs, ys, state=clipping)
        noised, drawing = noise(clipped, drawing)
        for name, value in noised.pytree.items():
            trained[name].grad = value / len(xs)
        optimizer.step()
        optimizer.zero_grad()

    return step


LIBRARIES: dict[str, Callable[[Case], Step]] = {
    "persample": ours,
    "Opacus hooks": lambda case: opacus(case, "hooks"),
    "Opacus ghost": lambda case: opacus(case, "ghost"),
    "opake": opake,
}


def _trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def case_of(name: str) -> Case:
    """The same model and batch every time, in train mode."""
    torch.manual_seed(0)
    return MODELS[name]()


def timed(name: str, rounds: int) -> dict[str, Any]:
    """Ratios of process time, from interleaved rounds."""
    started, cells = time.perf_counter(), []
    base = Cell("plain", "step", plain(case_of(name)))
    for library, build in LIBRARIES.items():
        cell = Cell(library, "step", lambda: None)
        try:
            cell.step = build(case_of(name))
            cell.step()
            cells.append(cell)
        except Exception as error:
            cell.found = {"state": "fails", "message": message(error)}
            cells.append(cell)
            cell.timed = False
    parts = Cell("noise", "step", noise_alone(case_of(name)))
    found: dict[str, Any] = {}
    for control, share in rounds_of(base, [*cells, parts], rounds, 1e9, started, time.process_time):
        found = {
            "plain_ms": statistics.median(base.seconds) * 1e3,
            "rounds": len(base.seconds),
            "control": summary(control, base.seconds),
            "processor share": share,
            "peers": {cell.peer: summary(cell, base.seconds) for cell in cells},
            "noise": summary(parts, base.seconds)["median"],
        }
    steps = {"plain": base.step, "persample": cells[0].step}
    return found | {"kernels": kernels(steps, max(3, rounds // 3))["persample"]}


def _peak(build: Callable[[Case], Step], name: str) -> dict[str, Any]:
    try:
        step = build(case_of(name))
        step()
        return {"bytes": peak(step)[0]}
    except Exception as error:
        return {"state": "fails", "message": message(error)}


def sized(name: str) -> dict[str, Any]:
    """Peak bytes of a step beyond what was resident, each in a process of its own."""
    found = {
        library: forked(lambda b=build: _peak(b, name))  # type: ignore[misc]
        for library, build in {"plain": plain, **LIBRARIES}.items()
    }
    base = found["plain"].get("bytes") or 1
    for cell in found.values():
        if "bytes" in cell:
            cell["ratio"] = cell["bytes"] / base
    return found


def in_warm_heap(name: str, rounds: int) -> dict[str, Any]:
    """Times in a process of its own, where freed memory is kept."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "times.json"
        command = [sys.executable, "-m", "benchmarks.private_step", name, "--times", str(result)]
        command += ["--rounds", str(rounds)]
        subprocess.run(command, env={**os.environ, **WARM}, cwd=ROOT, check=True)
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def parsed() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.private_step", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(GOALS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "private_step.json")
    parser.add_argument("--times", type=Path, help="measure the times of one model in this process")
    return parser.parse_args()


def main() -> None:
    """Measure the models one after the other; what is there of others stays."""
    warnings.simplefilter("ignore")
    given = parsed()
    torch.set_num_threads(1)
    limit()
    if given.times is not None:
        given.times.write_text(json.dumps(timed(given.models[0], given.rounds)))
        return
    prepare()
    result = json.loads(given.out.read_text()) if given.out.exists() else {"models": {}}
    result["environment"] = environment(1, "warm")
    for name in given.models:
        found, sizes = in_warm_heap(name, given.rounds), sized(name)
        for library, cell in sizes.items():
            if library != "plain":
                kept = {key: cell[key] for key in ("ratio", "state", "message") if key in cell}
                found["peers"][library] |= kept
        result["models"][name] = found | {"plain_bytes": sizes["plain"].get("bytes")}
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        for library, cell in found["peers"].items():
            print(name, library, cell, flush=True)


if __name__ == "__main__":
    main()
