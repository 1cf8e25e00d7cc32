"""The programs that the Makefile runs outside the suite can be imported, and write their pages."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"
OWN = r"-m ((?:tests|benchmarks)[\w.]*)"  # pytest and venv are not ours


def programs() -> list[str]:
    return sorted(set(re.findall(OWN, MAKEFILE.read_text())))


def test_the_makefile_names_the_programs() -> None:
    assert {"tests.browser.pages", "tests.gpu", "benchmarks.suspects"} <= set(programs())


@pytest.mark.parametrize("name", programs())
def test_programs_can_be_imported(name: str) -> None:
    found = importlib.util.find_spec(name)
    assert found is not None
    package = found.submodule_search_locations is not None
    try:
        module = importlib.import_module(f"{name}.__main__" if package else name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith(("persample", "tests", "benchmarks")):
            raise
        pytest.skip(f"{error.name} is not installed")
    assert hasattr(module, "main")


def test_the_browser_gets_its_quickest_page(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pages = importlib.import_module("tests.browser.pages")
    pages.features(tmp_path)
    assert 'id="suspects-table"' in (tmp_path / "features.html").read_text()
