"""Accuracy of private training at equal settings, beside Opacus, over several seeds.

    python -m benchmarks.private_accuracy [data sets ...] [--seeds 10] [--out FILE]

Two data sets of scikit-learn. Both libraries get the same model and initial weights, optimizer,
sampling rate, number of steps, clipping bound, divisor and noise multiplier; each draws batches and
noise by itself. The figure is the accuracy on held-out samples after the last step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from persample import private
from persample.private.digits import DigitNet, accuracy, digits

from .results import RESULTS, environment

EPSILONS = (1.0, 3.0, 8.0)
STUDENT = {10: 2.262, 12: 2.201, 15: 2.145, 20: 2.093}  # two-sided 95 %, by number of seeds
Split = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def tumours() -> Split:
    """The breast cancer data: 30 measurements, two classes; scaled by fixed constants."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    x, y = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target)
    x = (x.clamp(min=1e-3).log10() + 1) / 2  # no mean or deviation of the data enters
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held, kept = order[:114], order[114:]
    return (x[kept], y[kept]), (x[held], y[held])


def perceptron() -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Linear(30, 32), nn.Tanh(), nn.Linear(32, 2))


CASES: dict[str, tuple[Callable[[], Split], Callable[[], nn.Module], dict[str, Any]]] = {
    "digits": (digits, DigitNet, {"parts": 6, "epochs": 15, "lr": 8e-3}),
    "breast cancer": (tumours, perceptron, {"parts": 4, "epochs": 15, "lr": 5e-2}),
}


def losses(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of every sample."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def planned(size: int, epsilon: float, settings: dict[str, Any]) -> private.Plan:
    """Opacus draws at 1 / len(loader) and divides by the whole part of size · rate: so do we."""
    rate = 1 / settings["parts"]
    return private.plan(
        epsilon=epsilon, delta=1e-4, size=size, sample_rate=rate, divisor=int(size * rate),
        epochs=settings["epochs"],
    )  # fmt: skip


def ours(model: nn.Module, data: tuple[Tensor, ...], plan: private.Plan, lr: float) -> float:
    """Train with persample; the ε it reports."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    training = private.Training(model, optimizer, data, plan, losses, micro_batch=512, verify=False)
    for _ in training:
        pass
    return training.epsilon()


def opacus(model: nn.Module, data: tuple[Tensor, ...], plan: private.Plan, lr: float) -> float:
    """Train with Opacus; the ε that its PRV accountant reports."""
    from opacus import PrivacyEngine

    engine = PrivacyEngine(accountant="prv")
    batch = math.ceil(len(data[0]) * plan.sample_rate)
    loader = DataLoader(TensorDataset(*data), batch_size=batch, shuffle=True)
    wrapped, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr), data_loader=loader,
        noise_multiplier=plan.noise_multiplier, max_grad_norm=plan.max_norm,
    )  # fmt: skip
    done = 0
    while done < plan.steps:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            done += 1
            if done == plan.steps:
                break
    return float(engine.get_epsilon(plan.delta))


LIBRARIES = {"persample": ours, "Opacus": opacus}


def one(name: str, epsilon: float, seed: int) -> dict[str, tuple[float, float]]:
    """Accuracy and reported ε of both libraries from the same initial weights."""
    load, build, settings = CASES[name]
    train, test = load()
    plan = planned(len(train[0]), epsilon, settings)
    found = {}
    for library, run in LIBRARIES.items():
        torch.manual_seed(seed)
        model = build()
        spent = run(model, train, plan, settings["lr"])
        found[library] = (accuracy(model, test), spent)
    return found


def summary(runs: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Means with 95 % intervals, and that of the difference from seed to seed."""
    values = {name: [run[name][0] for run in runs] for name in LIBRARIES}
    pairs = zip(values["persample"], values["Opacus"], strict=True)
    values["difference"] = [a - b for a, b in pairs]
    found: dict[str, Any] = {"seeds": len(runs), "values": values}
    for name, numbers in values.items():
        factor = STUDENT.get(len(numbers), 2.262) / math.sqrt(len(numbers))
        half = factor * statistics.stdev(numbers) if len(numbers) > 1 else math.nan
        found[name] = {"mean": statistics.mean(numbers), "half": half}
    found["reported epsilon"] = {name: max(run[name][1] for run in runs) for name in LIBRARIES}
    return found


def main() -> None:
    """Train and write the results after every setting; what is there of others stays."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.private_accuracy", description=__doc__
    )
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="data set")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "private_accuracy.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"settings": {}, "cases": {}}
    if given.out.exists():
        result = json.loads(given.out.read_text())
    result["environment"] = environment()
    for name in given.cases:
        load, _, settings = CASES[name]
        size = len(load()[0][0])
        result["settings"][name] = {**settings, "size": size}
        for epsilon in EPSILONS:
            started = time.perf_counter()
            found = summary([one(name, epsilon, seed) for seed in range(given.seeds)])
            found["noise multiplier"] = planned(size, epsilon, settings).noise_multiplier
            result["cases"].setdefault(name, {})[f"{epsilon:g}"] = found
            given.out.write_text(json.dumps(result, indent=1) + "\n")
            took = time.perf_counter() - started
            print(name, epsilon, {k: found[k] for k in (*LIBRARIES, "difference")}, f"{took:.0f} s")


if __name__ == "__main__":
    main()
