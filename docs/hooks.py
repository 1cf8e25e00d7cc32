"""The site also shows two files that lie outside ``docs``: changelog and contributing page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the two files as pages."""
    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to the two files lead to their pages; links to other source files become text."""
    if "/" in page.file.src_uri:  # a page in a folder: ``..`` is docs itself
        return markdown
    for source, target in OUTSIDE.items():
        markdown = markdown.replace(f"](../{source}", f"]({target}")
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
