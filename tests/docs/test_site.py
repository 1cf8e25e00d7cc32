"""The documentation site: every page is in the navigation, every public name in the reference."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import persample
from persample import expanded_weights, inspection, private, testing

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = {"changelog.md", "contributing.md"}  # from files at the top, by docs/hooks.py
MODULES = (persample, private, testing, expanded_weights, inspection)
QUERIES = ("persample.Tape", persample.Tape)


def navigation() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    return re.findall(r"([\w/-]+\.md)$", text, re.MULTILINE)


def entries() -> dict[str, str]:
    """What stands under each ``::: name`` of the reference, up to the next one."""
    found = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        parts = re.split(r"^::: ([\w.]+)\n", page.read_text(), flags=re.MULTILINE)
        found |= dict(zip(parts[1::2], parts[2::2], strict=True))
    return found


def public() -> list[str]:
    names = []
    for module in MODULES:
        for name in module.__all__:
            doubled = module is inspection and name in persample.__all__
            names += [] if doubled else [f"{module.__name__}.{name}"]
    title, kind = QUERIES
    return names + [f"{title}.{name}" for name in vars(kind) if not name.startswith("_")]


def resolved(name: str) -> Any:
    """The object of a dotted name."""
    found: Any = persample
    for part in name.split(".")[1:]:
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(f"{found.__name__}.{part}")
    return found


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert len(navigation()) == len(set(navigation()))
    assert set(navigation()) == pages | GENERATED


@pytest.mark.parametrize("name", public())
def test_every_public_name_has_an_entry_with_an_example(name: str) -> None:
    """The example is run by test_docs.py."""
    entry = entries().get(name)
    assert entry is not None, f"docs/reference has no ::: {name}"
    shown = "".join(re.findall(r"```python\n(.*?)```", entry, re.DOTALL))
    last = name.rsplit(".", 1)[1]
    documented = ">>>" in (inspect.getdoc(resolved(name)) or "")
    assert last in shown or documented or name == "persample.testing", f"no example of {name}"


@pytest.mark.parametrize("name", sorted(entries()))
def test_every_entry_is_of_something_that_exists(name: str) -> None:
    assert resolved(name) is not None


def test_nothing_is_loaded_from_elsewhere() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings  # Material would fetch fonts
    assert "http" not in settings
    assert "http" not in (DOCS / "site.css").read_text()


def test_pictures_are_there_and_small() -> None:
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / link).stat().st_size < 400_000, link


def test_the_readme_fits_on_a_few_screens() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    top = "\n".join(lines[:20])
    for command in ("pip install persample", "make demo", "make test"):
        assert command in top
