"""Find wrong labels by the size of each sample's own gradient, on scikit-learn's digits."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import persample

WRONG = 20
console = Console()


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels of which a few are wrong, and which."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)
    flipped = torch.randperm(len(y), generator=generator)[:WRONG]
    y[flipped] = (y[flipped] + 1 + torch.randint(9, (WRONG,), generator=generator)) % 10
    return x, y, flipped


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int = 6) -> None:
    """An ordinary training loop."""
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in track(range(epochs), "training", console=console):
        for batch in torch.randperm(len(y), generator=generator).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


def measured(step: Callable[[], Any], rounds: int = 15) -> float:
    """Median milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Train, record, and show which samples have the largest gradients."""
    torch.manual_seed(0)
    x, y, flipped = data()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 9, 10),
    )  # fmt: skip
    train(model, x, y)

    norms = []
    for batch in track(range(0, len(y), 128), "recording", console=console):
        part = slice(batch, batch + 128)
        with persample.record(model) as tape:
            tape.backward(F.cross_entropy(model(x[part]), y[part], reduction="none"))
        norms.append(tape.norms())
    order = torch.cat(norms).argsort(descending=True)

    wrong = set(flipped.tolist())
    table = Table(title="the largest gradients of 1797 digits")
    for column in ("sample", "gradient norm", "label", "model says", ""):
        table.add_column(column, justify="right")
    said = model(x).argmax(1)
    sizes = torch.cat(norms)
    for i in order[:15].tolist():
        verdict = "[red]label was flipped[/red]" if i in wrong else ""
        table.add_row(str(i), f"{sizes[i]:.2f}", str(int(y[i])), str(int(said[i])), verdict)
    console.print(table)
    found = len(wrong & set(order[:WRONG].tolist()))
    console.print(f"{found} of the {WRONG} wrong labels are among the {WRONG} largest gradients.")
    report_cost(model, x[:128], y[:128])


def report_cost(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Time of a plain step against recorded ones, and the process's peak memory."""

    def plain() -> None:
        F.cross_entropy(model(x), y).backward()
        model.zero_grad()

    def recorded(question: str) -> Callable[[], Any]:
        def step() -> Any:
            with persample.record(model) as tape:
                tape.backward(F.cross_entropy(model(x), y, reduction="none"))
            return getattr(tape, question)()

        return step

    base = measured(plain)
    norms, grads = measured(recorded("norms")), measured(recorded("grads"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(
        f"one step on 128 digits: plain {base:.1f} ms, with every norm {norms:.1f} ms "
        f"({norms / base:.2f}×), with every gradient {grads:.1f} ms ({grads / base:.2f}×); "
        f"peak memory of this program {peak:.0f} MiB"
    )


if __name__ == "__main__":
    main()
