"""Every error says what to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import persample
from persample import errors

SOURCE = Path(persample.__file__).parent
KINDS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, persample.PersampleError)
}


def without_fix(source: str) -> Iterator[str]:
    """Errors that are made without a fix, or with an empty one."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in KINDS:
            fixes = [k.value for k in node.keywords if k.arg == "fix"]
            if not fixes or any(_may_be_empty(fix) for fix in fixes):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def _may_be_empty(fix: ast.expr) -> bool:
    if isinstance(fix, ast.IfExp):
        return _may_be_empty(fix.body) or _may_be_empty(fix.orelse)
    return isinstance(fix, ast.Constant) and not fix.value


def test_every_kind_is_public() -> None:
    assert set(persample.__all__) >= KINDS


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_every_error_has_a_fix(path: Path) -> None:
    assert list(without_fix(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    ["UsageError('x')", "raise StaleError('x', why='y')", "UsageError('x', fix='')",
     "UsageError('x', fix='y' if z else '')"],
)  # fmt: skip
def test_one_without_is_found(source: str) -> None:
    assert list(without_fix(source))


def test_a_reason_has_a_fix_of_its_own() -> None:
    error = errors.Reason("cumsum", "it adds up samples").error("samples interact before the loss")
    assert error.fix == errors.LOOP
