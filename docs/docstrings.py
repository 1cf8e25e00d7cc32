"""Docstrings as Markdown: doctests become code blocks, Sphinx roles become code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Docstrings(Extension):
    """Rewrites every docstring that the site shows."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called once for each object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Fence runs of doctest lines; ``:meth:`Tape.norms``` becomes code."""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text)
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if not inside and line.lstrip().startswith(">>>"):
            inside = True
            lines.append("```pycon")
        elif inside and not line.strip():
            inside = False
            lines.append("```")
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)
