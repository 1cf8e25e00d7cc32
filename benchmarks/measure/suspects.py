"""Do gradients find wrong labels? Five per cent of the labels of three data sets are changed.

    python -m benchmarks.suspects [--seeds 20] [--first 0] [--out FILE.json] [--plot FILE.svg]

For every data set and seed a network is trained from scratch on the changed labels, and inspected
twice: early (after a few epochs) and fully fitted (every label learned, mean loss below 0.01).
At each of these checkpoints samples are ranked by loss, by gradient norm and by the suspect score;
the figure is the area under the ROC curve for finding the changed labels. Rankings are compared
pair by pair at the same checkpoint. The score's constants were chosen on seeds 100 to 111.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn import datasets
from torch import Tensor, nn

import persample
from persample.inspection.scores import rank

from .results import environment

FLIPPED = 0.05
STAGES = ("early", "fitted")
RANKINGS = ("loss", "norm", "suspicion")
EARLY = {"digits": 3, "breast cancer": 10, "wine": 10}
STUDENT = {9: 2.262, 19: 2.093, 29: 2.045, 39: 2.023}  # two-sided 95 %, by degrees of freedom


def load(name: str) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    read: dict[str, Callable[[], Any]] = {
        "digits": datasets.load_digits,
        "breast cancer": datasets.load_breast_cancer,
        "wine": datasets.load_wine,
    }
    found = read[name]()
    x, y = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target)
    if name == "digits":
        return x.view(-1, 1, 8, 8) / 16, y
    return (x - x.mean(0)) / x.std(0), y


def network(name: str, width: int, classes: int) -> nn.Module:
    """A small convolutional network for the digits, three layers for the tables."""
    if name == "digits":
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, classes),
        )  # fmt: skip
    return nn.Sequential(
        nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes)
    )


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of every sample."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def auroc(scores: Tensor, positive: Tensor) -> float:
    """The probability that a changed label ranks above an unchanged one, ties counted half."""
    places = rank(scores.double()).double() * (len(scores) - 1) + 1
    p, q = int(positive.sum()), int((~positive).sum())
    return float((places[positive].sum() - p * (p + 1) / 2) / (p * q))


def judge(model: nn.Module, x: Tensor, y: Tensor, true: Tensor) -> dict[str, Any]:
    """Inspect one checkpoint."""
    batches = list(zip(x.split(128), y.split(128), strict=True))
    report = persample.inspect(model, losses, batches, check=False, progress=False)
    wrong = y != true
    k = int(wrong.sum())
    scores = {"loss": report.losses, "norm": report.norms, "suspicion": report.suspicion.score}
    vote = report.suspicion.vote
    assert vote is not None
    return {
        "auroc": {name: auroc(s, wrong) for name, s in scores.items()},
        "precision": {
            name: float(wrong[s.topk(k).indices].double().mean()) for name, s in scores.items()
        },
        "vote is the true label": float((vote == true)[wrong].double().mean()),
        "labels learned": float((report.predictions == y).double().mean()),
    }


def trial(name: str, seed: int) -> dict[str, Any]:
    """Change labels, train, and judge both checkpoints."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x, true = load(name)
    n, classes = len(true), int(true.max()) + 1
    count = round(FLIPPED * n)
    changed = torch.randperm(n, generator=generator)[:count]
    y = true.clone()
    y[changed] = (
        y[changed] + 1 + torch.randint(classes - 1, (count,), generator=generator)
    ) % classes
    model = network(name, x.shape[1], classes)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    found: dict[str, Any] = {"seed": seed}
    for epoch in range(1, 1001):
        for part in torch.randperm(n, generator=generator).split(64 if name == "digits" else 32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
        if epoch == EARLY[name]:
            found["early"] = judge(model, x, y, true)
        with torch.no_grad():
            scores = model(x)
        done = bool((scores.argmax(1) == y).all()) and float(F.cross_entropy(scores, y)) < 0.01
        if epoch > EARLY[name] and done:
            break
    found["epochs"] = epoch
    found["fitted"] = judge(model, x, y, true)
    return found


def interval(values: list[float]) -> dict[str, float]:
    """Mean and 95 % confidence interval (Student)."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return {"mean": mean, "low": mean, "high": mean}
    t = STUDENT.get(len(values) - 1, 2.1)
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def summarise(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of every ranking and paired differences of the suspect score."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        rows = [t[stage] for t in trials]
        found[stage] = {
            key: {r: statistics.mean(row[key][r] for row in rows) for r in RANKINGS}
            for key in ("auroc", "precision")
        }
        for other in ("loss", "norm"):
            found[stage][f"suspicion - {other}"] = interval(
                [row["auroc"]["suspicion"] - row["auroc"][other] for row in rows]
            )
        for key in ("vote is the true label", "labels learned"):
            found[stage][key] = statistics.mean(row[key] for row in rows)
    return found


def plot(summary: dict[str, Any]) -> str:
    """Paired differences with their intervals, one row per data set and checkpoint."""
    left, right, row, top = 190, 700, 34, 40
    values = [
        summary[name][stage][f"suspicion - {other}"][end]
        for name in summary for stage in STAGES for other in ("loss", "norm")
        for end in ("low", "high")
    ]  # fmt: skip
    low, high = min([*values, -0.01]) - 0.002, max(values) + 0.002

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    height = top + row * len(summary) * 2 + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 730 {height}" '
        'font-family="sans-serif" font-size="12" fill="#666">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        '<circle cx="200" cy="18" r="4" fill="#2f6bd8"/><text x="210" y="22">minus loss</text>',
        '<circle cx="300" cy="18" r="4" fill="#c2571a"/><text x="310" y="22">minus norm</text>',
    ]
    bottom = top + row * len(summary) * 2
    for k in range(math.ceil(low * 100), math.floor(high * 100) + 1):
        at = x(k / 100)
        width = 1.5 if k == 0 else 0.5
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}" stroke="#999" '
            f'stroke-width="{width}"/><text x="{at:.1f}" y="{bottom + 16}" '
            f'text-anchor="middle">{k / 100:+.2f}</text>'
        )
    parts.append(
        f'<text x="{(left + right) / 2}" y="{bottom + 36}" text-anchor="middle">AUROC of the '
        "suspect score above another ranking, mean over seeds and 95 % interval</text>"
    )
    for k, (name, stage) in enumerate((n, s) for n in summary for s in STAGES):
        y = top + row * (k + 0.5)
        parts.append(f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{name}, {stage}</text>')
        for other, colour, shift in (("loss", "#2f6bd8", -5), ("norm", "#c2571a", 5)):
            d = summary[name][stage][f"suspicion - {other}"]
            parts.append(
                f'<line x1="{x(d["low"]):.1f}" x2="{x(d["high"]):.1f}" y1="{y + shift}" '
                f'y2="{y + shift}" stroke="{colour}" stroke-width="2"/>'
                f'<circle cx="{x(d["mean"]):.1f}" cy="{y + shift}" r="4" fill="{colour}"/>'
            )
    return "".join([*parts, "</svg>\n"])


def main() -> None:
    """Run, print a table, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suspects", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"environment": environment(), "summary": {}, "trials": {}}
    for name in EARLY:
        seeds = range(given.first, given.first + given.seeds)
        trials = found["trials"][name] = [trial(name, seed) for seed in seeds]
        summary = found["summary"][name] = summarise(trials)
        for stage in STAGES:
            row = summary[stage]
            means = "  ".join(f"{r} {row['auroc'][r]:.4f}" for r in RANKINGS)
            d = row["suspicion - loss"]
            print(
                f"{name:14s} {stage:7s} {means}  minus loss {d['mean']:+.4f} "
                f"[{d['low']:+.4f}, {d['high']:+.4f}]",
                flush=True,
            )
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.plot is not None:
        given.plot.write_text(plot(found["summary"]))


if __name__ == "__main__":
    main()
