"""Where results are kept: JSON by part, each with the environment it was measured in."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import persample

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
WARM = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_THRESHOLD_": "100000000000"}
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed leaves the process at once
HEAPS = {"warm": WARM, "mapped": MAPPED, "default": {}}
PACKAGES = ("torch", "transformers", "opacus", "backpack-for-pytorch", "opake", "dattri-llm")


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(threads: int | None = None, heap: str | None = None) -> dict[str, Any]:
    """What numbers were measured on; without arguments, this process."""
    threads = torch.get_num_threads() if threads is None else threads
    if heap is None:
        heap = "warm" if all(name in os.environ for name in WARM) else "default"
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "usable cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "heap": heap,
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "persample": persample.__version__,
    }


def regime(threads: int, heap: str) -> str:
    """The key of a regime: threads and allocator."""
    return f"{heap} heap, {threads} thread{'s' if threads > 1 else ''}"


def load(directory: Path, part: str) -> dict[str, Any]:
    """The results of a part, empty if there are none."""
    path = directory / f"{part}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def rounded(value: Any) -> Any:
    """Floats with four digits: the rest is noise, and files stay readable."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def save(directory: Path, part: str, key: str, name: str, value: Any) -> None:
    """Write one entry: ``part.json``[key][name], replacing an earlier one."""
    directory.mkdir(parents=True, exist_ok=True)
    found = load(directory, part)
    found.setdefault(key, {})[name] = rounded(value)
    (directory / f"{part}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
