"""The picture of the packages on the design page, drawn from the import graph.

    python -m tests.picture    writes docs/packages.svg

An arrow leads from a package to one that it imports, unless the import is implied by other arrows.
Small modules and applications are drawn as one box each.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .house.test_house import RANK, graph, imports, reach, top

FILE = Path(__file__).parent.parent / "docs" / "packages.svg"
APPLICATIONS, FOUNDATIONS = "applications", "foundations"
DUTIES = {
    APPLICATIONS: "verify, inspect, command line, …",
    "api": "persample.record",
    "tape": "4. queries: norms, sums, products",
    "recording": "2. forward: sees every torch call",
    "backward": "3. runs autograd, collects gradients",
    "rules": "operator → form",
    "guards": "checks that only refuse",
    "inputs": "1. which tensors hold samples",
    "forms": "algebra of n gradients",
    "uses": "what a recording knows",
    "layouts": "where samples sit and move",
    FOUNDATIONS: "errors, validation, torch's graph, modes",
}
WIDTH, HEIGHT, ACROSS, DOWN = 250, 44, 280, 76
ASIDE = {"layouts": ACROSS // 2}  # so that no arrow passes behind a box


class Box(NamedTuple):
    """A package, and where it is drawn."""

    name: str
    x: int
    y: int


def arrows() -> dict[str, set[str]]:
    """The imports between boxes, without those that others imply."""
    pairs = {(box_of(i.importer), box_of(i.imported)) for i in imports()}
    edges = graph({(one, other) for one, other in pairs if one != other})
    return {
        name: {
            other
            for other in below
            if not any(other in reach(edges, middle) for middle in below - {other})
        }
        for name, below in edges.items()
    }


def box_of(module: str) -> str:
    """The box that a module is in: all above ``api`` and all below ``layouts`` are one each."""
    name = top(module)
    if RANK[name] > RANK["api"]:
        return APPLICATIONS
    return FOUNDATIONS if RANK[name] < RANK["layouts"] else name


def rows(edges: dict[str, set[str]]) -> list[list[str]]:
    """Boxes by the longest way that leads to them; in a row, in the order of the duties."""
    depth = dict.fromkeys(edges, 0)
    for _ in edges:
        for name, below in edges.items():
            for other in below:
                depth[other] = max(depth[other], depth[name] + 1)
    found: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for name in DUTIES:
        found[depth[name]].append(name)
    return found


def picture() -> str:
    """The whole file."""
    edges = arrows()
    levels = rows(edges)
    wide = max(len(row) for row in levels) * ACROSS
    boxes = {
        name: Box(
            name,
            wide // 2 + int((k - (len(row) - 1) / 2) * ACROSS) + ASIDE.get(name, 0),
            10 + DOWN * level,
        )
        for level, row in enumerate(levels)
        for k, name in enumerate(row)
    }
    lines = [_line(boxes[a], boxes[b]) for a in DUTIES for b in DUTIES if b in edges[a]]
    height = DOWN * len(levels)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {height}" '
        'font-family="sans-serif" font-size="13" text-anchor="middle">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="#888"/></marker></defs>',
        f'<rect width="{wide}" height="{height}" fill="#fff"/>',
        *lines,
        *(_drawn(box) for box in boxes.values()),
        "</svg>\n",
    ])  # fmt: skip


def _line(one: Box, other: Box) -> str:
    return (
        f'<line x1="{one.x}" y1="{one.y + HEIGHT}" x2="{other.x}" y2="{other.y}" '
        'stroke="#888" marker-end="url(#tip)"/>'
    )


def _drawn(box: Box) -> str:
    left = box.x - WIDTH // 2
    return (
        f'<rect x="{left}" y="{box.y}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
        'fill="#f4f6fa" stroke="#456"/>'
        f'<text x="{box.x}" y="{box.y + 18}" font-weight="bold">{box.name}</text>'
        f'<text x="{box.x}" y="{box.y + 36}" font-size="12" fill="#444">{DUTIES[box.name]}</text>'
    )


if __name__ == "__main__":
    FILE.write_text(picture())
