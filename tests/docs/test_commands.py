"""Commands that the pages name: make targets, ``persample`` and its options, ``python -m``."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path

import pytest

from persample.command_line.cli import parser

from ..smoke import SHORT, WHOLE

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
WORKFLOWS = [ROOT / ".ci" / "run", *(ROOT / ".github").rglob("*.yml")]
OWN = r"-m ((?:tests|benchmarks)[\w.]*)"


def commands() -> dict[str, set[str]]:
    """Every command of the command line, and its options."""
    (action,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return {name: set(found._option_string_actions) for name, found in action.choices.items()}


def code(page: Path) -> str:
    """Code in the text and in blocks; prose may say "make" and mean something else."""
    text = page.read_text()
    if page.suffix != ".md":
        return text
    blocks = re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL)
    rest = re.sub(r"```[^\n]*\n.*?```", "", text, flags=re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", rest)])


@pytest.mark.parametrize("page", [*PAGES, *WORKFLOWS], ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    text, known = code(page), commands()
    for target in re.findall(r"^[\s$-]*(?:run: )?make ([a-z][\w-]*)", text, re.MULTILINE):
        assert target in TARGETS, f"make {target}"
    for name in re.findall(r"\bpython -m (tests[\w.]*|benchmarks[\w.]*)", text):
        assert importlib.util.find_spec(name) is not None, name
    for name, rest in re.findall(r"^[\s$]*persample ([a-z]+)\b([^\n]*)", text, re.MULTILINE):
        assert name in known, f"persample {name}"
        for option in re.findall(r"(?<!\S)(--[a-z-]+)", rest):
            assert option in known[name], f"persample {name} {option}"


def test_the_page_of_the_command_line_is_complete() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text()
    for name, options in commands().items():
        assert f"`persample {name}" in text
        for option in options - {"-h", "--help"}:
            assert option in text, f"persample {name} {option}"


def test_every_target_has_a_short_run() -> None:
    assert set(SHORT) | WHOLE == TARGETS
    assert not set(SHORT) & WHOLE


@pytest.mark.parametrize("target", sorted(SHORT))
def test_the_short_run_calls_what_the_target_calls(target: str) -> None:
    recipe = re.search(rf"^{target}:[^\n]*\n((?:\t[^\n]*\n|\\\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    wanted = set(re.findall(OWN, recipe[1])) - {"benchmarks.tables"}
    short = " ".join(SHORT[target])
    assert wanted - {"benchmarks.tables"} <= set(re.findall(OWN, short))
    for script in ("persample", "mkdocs"):
        assert (f"$(BIN)/{script} " in recipe[1]) == short.startswith(script)


def test_continuous_integration_runs_everything_and_ends_with_pytest() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make")] == [
        "make test-browser", "make smoke", "make test",
    ]  # fmt: skip
    assert "pytest" in MAKEFILE.split("\ntest:")[1].split("\n\n")[0].splitlines()[-1]
