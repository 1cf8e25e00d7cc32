"""The pages on private training name tests that exist and programs as long as they say."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample
from persample import private

from .programs import data, training

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def names_in(path: Path) -> set[str]:
    """The names of a file's tests."""
    found = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in found if isinstance(node, ast.FunctionDef)}


def rows(page: str, start: str) -> list[list[str]]:
    """The cells of the first table after a text."""
    text = (DOCS / page).read_text()
    lines = text[text.index(start) :].splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("| ---"))
    found = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def test_every_yes_of_the_feature_table_is_a_test() -> None:
    table = rows("private-training.md", "## Compared with other libraries")
    assert len(table) > 15
    for name, ours, *others in table:
        assert len(others) == 3, name
        if ours in ("no", "later"):
            continue
        found = re.search(r"^yes: \[(test_\w+)\]\((\.\./tests/private/test_\w+\.py)\)", ours)
        assert found, ours
        assert found[1] in names_in(DOCS / found[2]), ours


def test_every_pitfall_has_a_severity_and_a_test() -> None:
    known = set.union(*(names_in(path) for path in (ROOT / "tests/private").glob("test_*.py")))
    table = rows("private-pitfalls.md", "# What can go wrong")
    assert len(table) > 25
    for what, severity, does, named in table:
        assert severity.split()[0] in ("fatal", "serious", "mild"), what
        assert does
        tests = re.findall(r"`(test_\w+)`", named)
        assert tests or named.startswith("no test"), what
        assert set(tests) <= known, set(tests) - known


def lines(program: str) -> int:
    """Statements and heads of blocks, however they are broken."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(program)))


def test_no_more_lines_than_with_opacus() -> None:
    text = (DOCS / "from-opacus.md").read_text()
    theirs, ours = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "make_private_with_epsilon" in theirs
    assert "private.Training" in ours
    assert lines(ours) <= lines(theirs)
    assert (lines(ours), lines(theirs)) == (17, 18)


# ---------------------------------------------------------------------- a pitfall of its own


class Remembering(nn.Module):
    """Subtracts the mean of the batch before, kept where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(5, 3), torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        before, self.seen = self.seen, x.mean(0).detach()
        out: Tensor = self.layer(x - before)
        return out


def test_memory_between_batches_is_found() -> None:
    def found(model: type[nn.Module], *size: int) -> Any:
        return private.replay(
            lambda given: training(model(*size), given), data(), remove=3, steps=2
        )

    assert found(nn.Linear, 5, 3).ok
    assert not found(Remembering).ok
    with pytest.raises(persample.VerificationError, match="gradients"):
        next(iter(training(Remembering(), verify=True)))
