"""The design page: its picture is the import graph, and what it lists is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.measure.results import RESULTS

from ..house.test_house import SOURCE, modules
from ..picture import DUTIES, FILE, arrows, box_of, picture, rows

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "design.md").read_text()


def section(title: str) -> str:
    """The text under a heading, without the next heading of any kind."""
    return re.split(r"^#+ ", PAGE.split(f" {title}\n")[1], flags=re.MULTILINE)[0]


def test_the_picture_is_the_import_graph() -> None:
    assert FILE.read_text() == picture(), "run python -m tests.picture"
    assert {box_of(name) for name in modules()} == set(DUTIES)
    assert arrows()["recording"] == {"backward"}
    assert [row for row in rows(arrows()) if "guards" in row] == [["rules", "guards", "inputs"]]


def test_at_most_eight_files_are_read_first() -> None:
    files = re.findall(r"^\d+\. `([\w/.]+)`", section("Eight files to read first"), re.MULTILINE)
    assert 1 <= len(files) <= 8
    assert all((SOURCE / file).is_file() for file in files)


def test_paths_are_there() -> None:
    for path in re.findall(r"`([a-z_]+/[\w/.]*|[a-z_]+\.py)`", PAGE):
        nearby = [SOURCE, SOURCE / "tape", DOCS.parent]
        assert any((root / path).exists() for root in nearby), path


def test_every_word_has_one_meaning() -> None:
    words = re.findall(r"^\| ([a-z ]+) \|", section("Words"), re.MULTILINE)
    assert len(words) > 20
    assert len(words) == len(set(words))


def test_the_number_of_programs() -> None:
    programs = json.loads((RESULTS / "guards.json").read_text())["programs"]
    assert f"counts over {sum(programs.values()):,} programs" in " ".join(PAGE.split())


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda p: p.name)
def test_links_to_headings(page: Path) -> None:
    for file, anchor in re.findall(r"\]\(([\w.-]*)#([\w-]+)\)", page.read_text()):
        text = (DOCS / file).read_text() if file else page.read_text()
        heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
        assert anchor in slugs, anchor
