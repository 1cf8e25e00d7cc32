"""Everything the documents show runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import persample

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [name for _, name, _ in pkgutil.walk_packages(persample.__path__, "persample.")]


@pytest.mark.parametrize("name", ["persample", *MODULES])
def test_docstrings(name: str) -> None:
    torch.manual_seed(0)
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
@pytest.mark.filterwarnings("ignore:Secure RNG turned off")  # what Opacus says at every start
def test_pages(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    if any("opacus" in block for block in blocks):
        pytest.importorskip("opacus")
    names: dict[str, object] = {}
    for block in blocks:
        torch.manual_seed(0)
        exec(compile(block, str(page), "exec"), names)
