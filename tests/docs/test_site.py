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


def public() -> dict[str, Any]:
    """Every public name and what it stands for."""
    found = {}
    for module in MODULES:
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    methods = {k: v for k, v in vars(persample.Tape).items() if not k.startswith("_")}
    return found | {f"persample.Tape.{name}": value for name, value in methods.items()}


def resolved(name: str) -> Any:
    """The object of a dotted name, modules first: ``private.plan`` is one, and a function."""
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:k]))
        except ModuleNotFoundError:
            continue
        for part in parts[k:]:
            found = inspect.getattr_static(found, part, None) or getattr(found, part)
        return found
    raise AssertionError(name)


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert len(navigation()) == len(set(navigation()))
    assert set(navigation()) == pages | GENERATED


@pytest.mark.parametrize("name", sorted(public()))
def test_every_public_name_has_an_entry_with_an_example(name: str) -> None:
    """The example is run by test_docs.py."""
    thing = public()[name]
    found = [text for entry, text in entries().items() if resolved(entry) is thing]
    assert found, f"docs/reference has no ::: {name}"
    shown = "".join(re.findall(r"```python\n(.*?)```", found[0], re.DOTALL))
    if name == "persample.testing":
        return  # a module: each of its names has an example
    assert name.rsplit(".", 1)[1] in shown or ">>>" in (inspect.getdoc(thing) or ""), name


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
