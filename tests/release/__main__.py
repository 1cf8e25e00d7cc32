"""Build sdist and wheel, install the wheel in fresh environments, and try it there.

    python -m tests.release [--torch 2.10.0 2.13.0 2.15.0] [--with-dependencies] [--build-only]

Each version of torch gets an environment of its own, and so does each extra that users install.
torch is installed without its own dependencies except those in pure Python: on Linux the others are
gigabytes of CUDA libraries. A wheel that cannot be loaded without them is reported as "not tested";
``--with-dependencies`` installs everything. It fails if something fails, or if nothing was tested.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "build" / "dist"
PINNED = "2.13.0"  # of constraints.txt
TORCH = ("2.10.0", PINNED, "2.15.0")  # the oldest, the one of the tests, the newest
PURE = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
EXTRAS = ("", "demo", "private")  # for users
OTHERS = ("docs", "bench", "test", "release")  # for contributors: it is enough that they resolve
IN_WHEEL = ("persample/py.typed", "persample/inspection/page.css", "persample/inspection/page.js")
IN_SDIST = ("README.md", "CHANGELOG.md", "Makefile", "mkdocs.yml", "constraints.txt", "LICENSE")


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command that sees no package but those of its own environment."""
    around = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=around, text=True, capture_output=True, check=False)


def expect(done: subprocess.CompletedProcess[str], what: str) -> None:
    """End here if a command failed, and show why."""
    if done.returncode:
        sys.exit(f"release-check: {what} failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def build() -> Path:
    """Both files, with everything that belongs into them; the wheel."""
    for old in DIST.glob("*"):
        old.unlink()
    expect(run(sys.executable, "-m", "build", "--no-isolation", "-o", DIST, ROOT), "build")
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    absent = [name for name in IN_WHEEL if name not in names]
    stray = [name for name in names if not re.match(r"persample(-[^/]*\.dist-info)?/", name)]
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    absent += [name for name in IN_SDIST if name not in inside]
    if absent or stray:
        sys.exit(f"release-check: missing {absent}, not expected {stray}")
    expect_changelog(wheel.name.split("-")[1])
    print(f"{wheel.name}, {sdist.name}: built", flush=True)
    return wheel


def expect_changelog(version: str) -> None:
    """A release has a section of its own; before it, changes are unreleased."""
    head = "Unreleased" if ".dev" in version else version
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(head)}\b", text, re.MULTILINE):
        sys.exit(f"release-check: CHANGELOG.md has no section {head!r} for version {version}")


def pip(environment: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-warn-conflicts")
    return run(environment / "bin" / "python", "-m", "pip", "install", *quiet, *arguments)


def torch_environment(folder: Path, version: str, whole: bool) -> tuple[Path, str]:
    """An environment with torch, and why it cannot be used; empty if it can."""
    made = folder / f"torch-{version}"
    expect(run(sys.executable, "-m", "venv", made), "venv")
    if whole or version == PINNED:
        found = pip(made, f"torch=={version}")
    else:
        found = pip(made, "--no-deps", f"torch=={version}")
        expect(pip(made, *PURE), "dependencies of torch")
    if found.returncode:
        return made, (found.stderr.strip().splitlines() or ["it cannot be installed"])[-1]
    loaded = run(made / "bin" / "python", "-c", "import torch")
    return made, "" if not loaded.returncode else loaded.stderr.strip().splitlines()[-1]


def try_extra(base: Path, folder: Path, wheel: Path, extra: str) -> str:
    """The wheel with one extra, in a fresh environment that borrows torch from ``base``."""
    made = folder / f"{base.name}-{extra or 'plain'}"
    expect(run(sys.executable, "-m", "venv", made), "venv")
    (site,) = made.glob("lib/python*/site-packages")
    (torch_site,) = base.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(f"{torch_site}\n")
    version = base.name.partition("-")[2]
    pins = folder / f"{base.name}.txt"
    pins.write_text(f"torch=={version}\n")
    # torch is there, with what it needs: only the packages of the extra are installed
    expect(pip(made, "--no-deps", wheel), f"installing {wheel.name}")
    wanted = [r for r in requirements(wheel, extra) if not r.startswith("torch")]
    if wanted:
        expect(pip(made, "-c", ROOT / "constraints.txt", *wanted), f"installing [{extra}]")
    done = run(made / "bin" / "python", ROOT / "tests" / "release" / "smoke.py", extra, cwd=folder)
    expect(done, f"torch {version}, extra {extra or 'none'}")
    return done.stdout.strip()


def requirements(wheel: Path, extra: str) -> list[str]:
    """What the wheel's metadata ask for under an extra."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    found = []
    for line in re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE):
        need, _, marker = (part.strip() for part in line.partition(";"))
        named = re.search(r"extra == ['\"](\w+)['\"]", marker)
        if (named[1] if named else "") in ("", extra):
            found.append(need)
    return found


def main() -> None:
    """Everything, or the build alone."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--torch", nargs="+", default=TORCH)
    parser.add_argument("--with-dependencies", action="store_true")
    parser.add_argument("--build-only", action="store_true")
    given = parser.parse_args()
    wheel = build()
    for extra in OTHERS:
        if not requirements(wheel, extra)[1:]:
            sys.exit(f"release-check: the extra {extra!r} is empty")
    if given.build_only:
        return
    tested = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for version in given.torch:
            base, trouble = torch_environment(folder, version, given.with_dependencies)
            if trouble:
                print(f"torch {version}: not tested: {trouble}", flush=True)
                continue
            for extra in EXTRAS:
                print(try_extra(base, folder, wheel, extra), flush=True)
                tested += 1
    if not tested:
        sys.exit("release-check: no version of torch could be loaded, so nothing was tested")
    print(f"release-check: {tested} environments passed")


if __name__ == "__main__":
    main()
