"""The battery and the benchmark on a CUDA device, and a summary a person can send back.

    python -m tests.gpu [--device cuda] [words for pytest -k]

Without such a device it says so and does nothing. ``--device cpu`` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

import persample

BENCHMARK = ("mlp", "cnn", "resnet18", "vit", "gpt", "bert")


def battery(device: str, words: list[str]) -> list[str]:
    """All tests on the device: totals, and the names of those that failed."""
    chosen = ["-k", " or ".join(words)] if words else []
    options = ["--device", device, "-o", "addopts=", "-rfE", "--tb=no", *chosen]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    totals = [line.strip("= ") for line in lines if re.search(r"\d+ (passed|failed|error)", line)]
    return [f"tests: {totals[-1] if totals else done.stderr[-400:]}", *failed[:40]]


def waits(device: str) -> list[str]:
    """How often recording makes the host wait for the device (CUDA's own count)."""
    if torch.device(device).type != "cuda":
        return ["waits for the device: counted on CUDA only"]
    from benchmarks.models import MODELS

    found = []
    with torch.device(device):
        for name in ("mlp", "gpt"):
            model, x, y, loss = MODELS[name]()
            for question in ("nothing", "norms", "clipped_sum"):
                found.append(f"{name}, {question}: {_waits(model, x, y, loss, question)}")
    return ["waits for the device: " + "; ".join(found)]


def _waits(model: torch.nn.Module, x: object, y: object, loss: object, question: str) -> int:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with persample.record(model) as tape:
                tape.backward(loss(model(x), y))  # type: ignore[operator]
            if question == "norms":
                tape.norms()
            elif question == "clipped_sum":
                tape.clipped_sum(1.0)
        return Counter("synchroniz" in str(w.message) for w in seen)[True]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def benchmark(device: str, models: tuple[str, ...]) -> list[str]:
    """Ratios to a plain step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ratios.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.measure.device",
            *models,
            "--device",
            device,
            "--out",
        ]
        done = subprocess.run([*command, str(out)], capture_output=True, text=True, check=False)
        if done.returncode:
            return [f"benchmark failed: {done.stderr[-400:]}"]
        found = json.loads(out.read_text())["models"]
    return ["ratio to a plain step:"] + [
        f"  {name:10s} plain {row['plain_ms']:7.1f} ms  "
        + "  ".join(f"{key} {value:.2f}" for key, value in row["ratio"].items())
        for name, row in found.items()
    ]


def main() -> int:
    """Run everything and print the summary."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="*", default=BENCHMARK)
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    cuda = torch.device(given.device).type == "cuda"
    if cuda and not torch.cuda.is_available():
        print("gpu-check: there is no CUDA device on this machine; nothing was run.")
        return 0
    start = time.time()
    tests = battery(given.device, given.words)
    lines = [
        "persample gpu-check: please send everything from here on",
        f"persample {persample.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Python {platform.python_version()}",
        f"device: {torch.cuda.get_device_name() if cuda else given.device}",
        *tests,
        *waits(given.device),
        *benchmark(given.device, tuple(given.models)),
        f"{time.time() - start:.0f} seconds",
    ]
    print("\n".join(lines))
    return 1 if re.search(r"failed|error", tests[0]) else 0


if __name__ == "__main__":
    sys.exit(main())
