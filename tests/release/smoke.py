"""Runs in a fresh environment that has the wheel and one extra: python smoke.py EXTRA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import persample


def losses(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def main(extra: str) -> None:
    """The core in every environment, and what the extra is for."""
    assert "site-packages" in str(Path(persample.__file__))
    torch.manual_seed(0)
    model, batch = torch.nn.Linear(4, 3), (torch.randn(6, 4), torch.randint(3, (6,)))
    with persample.record(model) as tape:
        tape.backward(losses(model, batch))
    expected = persample.testing.oracle(model, losses, batch)
    assert persample.testing.relative_error(tape.grads(), expected) < 1e-5
    assert persample.verify(model, losses, batch).ok
    report = persample.inspect(model, losses, [batch, batch], progress=False)
    assert "<html" in report.to_html("report.html").read_text(encoding="utf-8")
    command("--version")
    if extra == "demo":
        command("inspect", "--batches", "3")
    if extra == "private":
        from persample import private

        plan = private.plan(noise_multiplier=1.0, delta=1e-2, size=6, batch_size=3, steps=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = private.Training(model, optimizer, batch, plan, loss_fn=losses)
        assert list(training) == [1, 2]
        assert training.epsilon() > 0
    print(f"torch {torch.__version__}, {extra or 'no extra'}: ok")


def command(*arguments: str) -> None:
    """``persample`` as it is installed."""
    script = Path(sys.executable).parent / "persample"
    subprocess.run([str(script), *arguments], check=True, capture_output=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
