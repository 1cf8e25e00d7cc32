"""The way of one ``nn.Linear`` through the source, traced: ``python -m tests.way``.

For each part of a step: which packages are entered, in the order in which they are entered first,
and which of their files. A package is entered where a function of one calls a function of another;
coming back by ``return`` is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import persample

SOURCE = Path(persample.__file__).parent
# files before the modules were moved into packages, by this program
BEFORE = {
    "F.linear, first call": 18,
    "F.linear, known": 13,
    "model(x), first call": 25,
    "model(x), known": 21,
    "backward": 28,
    "norms": 20,
    "clipped_sum": 22,
}


@dataclass
class Way:
    """The files that were entered, by package, in order, and how often packages were."""

    files: dict[str, list[str]] = field(default_factory=dict)
    entries: dict[str, int] = field(default_factory=dict)

    @property
    def packages(self) -> list[str]:
        """Folders of the source; modules at the top (errors, validation, …) are not counted."""
        return [name for name in self.files if (SOURCE / name).is_dir()]

    def count(self) -> int:
        """How many files."""
        return sum(len(files) for files in self.files.values())

    def note(self, path: Path, caller: str | None) -> str:
        """A function of a file was called from a package (None: from elsewhere)."""
        parts = path.relative_to(SOURCE).parts
        package = parts[0].removesuffix(".py")
        files = self.files.setdefault(package, [])
        if "/".join(parts) not in files:
            files.append("/".join(parts))
        if package != caller:
            self.entries[package] = self.entries.get(package, 0) + 1
        return package


@contextmanager
def traced() -> Iterator[Way]:
    """Follow every call of a function of ours."""
    way = Way()
    packages: dict[int, str | None] = {}  # of running frames: the innermost package

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "return":
            packages.pop(id(frame), None)
        elif event == "call":
            path = Path(frame.f_code.co_filename)
            if SOURCE in path.parents:
                packages[id(frame)] = way.note(path, _caller(frame.f_back, packages))

    sys.setprofile(look)
    try:
        yield way
    finally:
        sys.setprofile(None)


def _caller(frame: Any, packages: dict[int, str | None]) -> str | None:
    while frame is not None:
        if id(frame) in packages:
            return packages[id(frame)]
        frame = frame.f_back
    return None


def step(model: torch.nn.Linear) -> dict[str, Way]:
    """One recorded step; the way of each of its parts."""
    ways: dict[str, Way] = {}

    def part(name: str, run: Callable[[], Any]) -> Any:
        with traced() as ways[name]:
            return run()

    x = torch.randn(4, model.in_features)
    with persample.record(model) as tape:
        losses = part("model(x)", lambda: model(x)).square().sum(1)
        part("backward", lambda: tape.backward(losses))
    part("norms", tape.norms)
    part("clipped_sum", lambda: tape.clipped_sum(1.0))
    return ways


def operator(model: torch.nn.Linear) -> Way:
    """The operator alone, on data that are known."""
    x = torch.randn(4, model.in_features)
    with persample.record(model) as tape:
        tape.mark(x)
        with traced() as way:
            out = F.linear(x, model.weight, model.bias)
        tape.backward(out.square().sum(1))
    return way


def measured() -> dict[str, Way]:
    """A first step, and one of the same calls; sizes that were not seen before are not known."""
    model, other = torch.nn.Linear(17, 13), torch.nn.Linear(13, 17)
    ways = {"F.linear, first call": operator(model), "F.linear, known": operator(model)}
    first, known = step(other), step(other)
    ways |= {"model(x), first call": first["model(x)"], "model(x), known": known["model(x)"]}
    return ways | {name: known[name] for name in ("backward", "norms", "clipped_sum")}


def main() -> None:
    """Print the ways."""
    for name, way in measured().items():
        top = len(way.files) - len(way.packages)
        print(
            f"{name}: {len(way.packages)} packages and {top} modules at the top, {way.count()} "
            f"files ({BEFORE[name]} before there were packages)"
        )
        for package, files in way.files.items():
            names = ", ".join(file.removeprefix(package + "/") for file in files)
            print(f"    {package:16} entered {way.entries[package]:3}×  {names}")


if __name__ == "__main__":
    main()
