"""Imports point one way; the package has one name; every rule has a case."""

from __future__ import annotations

import ast
from pathlib import Path

import persample
from persample.propagate.table import RULES as LAYOUT_RULES
from persample.rules import RULES

SOURCE = Path(persample.__file__).parent
ORDER = [
    "errors", "requests", "nodes", "layout", "settling", "propagate", "forms", "conditions",
    "steady", "kinds", "use", "through", "marks", "parameters", "soiled", "values", "distributed",
    "rules", "scaling", "tap", "enter", "eager", "arguments", "guess", "declared", "inputs",
    "refusals", "entries", "walls", "forming", "explain", "clipping", "buffers", "queries", "lean",
    "intake", "ledger", "positions", "asked", "products", "moments", "tape", "taken", "hooks",
    "functions", "watch", "custom", "proof", "loop", "backward", "engine", "operands", "recurrent",
    "parties", "marking", "meeting", "origins", "repeated", "calls", "subclasses", "recorder",
    "entry", "testing", "check", "expanded_weights", "memory", "inspection", "target",
    "demonstration", "cli", "__main__",
]  # fmt: skip


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports at run time."""
    found = set()
    package = path.relative_to(SOURCE).parts[:-1]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = (*base, *(node.module or "").split("."))
            names = [t for t in target if t] or [a.name for a in node.names]
            found.add(names[0])
    return found


def test_imports_point_one_way() -> None:
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        own = ORDER.index(parts[0])
        for name in imports(path):
            assert ORDER.index(name) <= own, f"{'/'.join(parts)} imports {name}"


def test_every_file_is_in_the_order() -> None:
    names = {p.relative_to(SOURCE).with_suffix("").parts[0] for p in SOURCE.rglob("*.py")}
    assert names - {"__init__"} == set(ORDER)


def test_every_rule_has_a_layout_rule() -> None:
    assert set(RULES) <= set(LAYOUT_RULES)


def test_no_public_function_is_called_like_a_module() -> None:
    modules = {p.stem for p in SOURCE.glob("*.py")} | {
        p.name for p in SOURCE.iterdir() if p.is_dir()
    }
    functions = {n for n in persample.__all__ if callable(getattr(persample, n))}
    assert not modules & functions
