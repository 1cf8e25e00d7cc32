"""Every file and name of PyTorch's package is here, with the same arguments, and in the docs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.nn.utils import _expanded_weights as original

from persample import expanded_weights

FOLDER = Path(original.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
# not of the system itself: a short name of torch's operators, two type variables
ASIDE = {("expanded_weights_impl", "aten"), *(("conv_expanded_weights", n) for n in ("_P", "_R"))}


class Part(NamedTuple):
    """A name that a file defines at its top, or in a class at its top."""

    file: str
    name: str
    node: ast.stmt


def parts(folder: Path) -> list[Part]:
    """What the files of a package define, read without importing them."""
    found = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            found += [
                Part(path.stem, name, node) for name in _defined(node, top=path.stem == "__init__")
            ]
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    names = [n for n in _defined(inner) if n != "__new__"]
                    found += [Part(path.stem, f"{node.name}.{n}", inner) for n in names]
    return [p for p in found if (p.file, p.name) not in ASIDE]


def _defined(node: ast.stmt, *, top: bool = False) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    if isinstance(node, ast.ImportFrom) and node.level == 1 and top:
        return [alias.name for alias in node.names]
    return []


def ours(part: Part) -> Any:
    """The same name in the file of the same name."""
    home: Any = expanded_weights
    if part.file != "__init__":
        home = importlib.import_module(f"persample.expanded_weights.{part.file}")
    for name in part.name.split("."):
        home = getattr(home, name)
    return home


def different(folder: Path) -> list[str]:
    """Names that are missing, and functions whose arguments have other names or defaults."""
    found = []
    for part in parts(folder):
        try:
            value = ours(part)
        except (ImportError, AttributeError) as missing:
            found.append(f"{part.file}.{part.name}: {missing}")
            continue
        rule = part.name.endswith((".forward", ".backward", ".__torch_function__"))
        if isinstance(part.node, ast.FunctionDef) and not rule and inspect.isroutine(value):
            theirs = [a.arg for a in part.node.args.args]
            mine = list(inspect.signature(value).parameters)
            if mine != theirs:
                found.append(f"{part.file}.{part.name}: {theirs} there, {mine} here")
            needed = len(theirs) - len(part.node.args.defaults)
            kinds = list(inspect.signature(value).parameters.values())
            if sum(p.default is p.empty for p in kinds) != needed:
                found.append(f"{part.file}.{part.name}: other defaults")
    return found


def rows() -> list[list[str]]:
    """The table on the page: file, names, there, here, what is right here."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.split("### Every file and name")[1].split("\n#")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_name_is_here() -> None:
    assert len(parts(FOLDER)) > 50
    assert different(FOLDER) == []


def test_the_entry_is_here() -> None:
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    mine = inspect.signature(expanded_weights.call_for_per_sample_grads)
    theirs = inspect.signature(call_for_per_sample_grads)
    assert list(mine.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        assert mine.parameters[name].default == parameter.default
        assert mine.parameters[name].kind == parameter.kind


def test_the_page_has_every_name() -> None:
    shown = {(file.strip("`"), name) for file, names, *_ in rows() for name in _ticked(names)}
    walked = {(p.file, p.name.split(".")[0]) for p in parts(FOLDER)}
    walked -= {("__init__", "__all__")}
    assert walked - shown == set()
    assert {file for file, _ in shown} - {file for file, _ in walked} == {"_per_sample_grad"}


def _ticked(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[1])
def test_rows_are_whole_and_their_places_true(row: list[str]) -> None:
    assert len(row) == 5
    assert all(row)
    file, names = row[0].strip("`"), _ticked(row[1])
    if file not in ("__init__", "_per_sample_grad"):
        assert (Path(expanded_weights.__file__).parent / f"{file}.py").exists()
    for name in names:
        home = "__init__" if file == "_per_sample_grad" else file
        ours(Part(home, name, ast.Pass()))


def test_a_missing_name_and_another_signature_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "conv_utils.py").write_text("def conv_picker(func): ...\ndef nobody(): ...\n")
    (tmp_path / "other_expanded_weights.py").write_text("X = 1\n")
    found = different(tmp_path)
    assert len(found) == 4
    assert "nobody" in found[2]
    assert "other_expanded_weights" in found[3]
