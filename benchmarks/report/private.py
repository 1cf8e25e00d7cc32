"""Tables of private training: accuracy, steps, proofs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..measure.private_step import GOALS, LIBRARIES, MEMORY_GOAL
from .rows import disturbed, figure, table

MODEL = re.compile(r"replay: \w+, (flat|automatic|per_layer)$")
ERROR = re.compile(r"off by (\S+) C")


def accuracy(found: dict[str, Any]) -> str:
    """Both libraries by data set and ε, and their difference."""
    body = []
    for name, settings in found.get("cases", {}).items():
        for epsilon, case in settings.items():
            cells = [_interval(case[key]) for key in ("persample", "Opacus", "difference")]
            noise = f"{case['noise multiplier']:.3f}"
            body.append([name, epsilon, noise, str(case["seeds"]), *cells])
    head = ["data set", "ε", "noise multiplier", "seeds", "persample", "Opacus", "difference"]
    return table(head, body) if body else ""


def _interval(found: dict[str, float]) -> str:
    text = f"{100 * found['mean']:.1f} ± {100 * found['half']:.1f} %"
    return text.replace("-", "−")


def steps_of_training(found: dict[str, Any]) -> str:
    """Time and peak memory of a private step, the goals beside them."""
    models = found.get("models", {})
    measured = {peer for model in models.values() for peer in model["peers"]}
    names = [peer for peer in LIBRARIES if peer in measured]
    body, noted, quoted = [], [], []
    for name, model in models.items():
        peers = model["peers"]
        times = [_cell(peers.get(peer, {}), "median") for peer in names]
        sizes = [_cell(peers.get(peer, {}), "ratio") for peer in names]
        goal = figure(GOALS[name]) if name in GOALS else "–"
        plain = f"{figure(model['plain_ms'])} ms"
        again = figure(model["control"]["median"])
        floor = [figure(model[key]) if key in model else "–" for key in ("kernels", "noise")]
        body.append([name, plain, again, times[0], goal, *floor, *times[1:], *sizes])
        noted += [name] if disturbed(model) else []
        quoted += [
            f"{peer} on {name}: `{peers[peer]['message']}`"
            for peer in names
            if "message" in peers.get(peer, {})
        ]
    if not body:
        return ""
    head = ["model", "plain", "plain again", "persample", "goal", "kernels alone", "noise alone"]
    head += names[1:]
    head += [f"memory, {peer}" for peer in names]
    text = table(head, body) + f"\n\nThe goal for memory is {MEMORY_GOAL}."
    if noted:
        text += f" Other programs ran during the measurement of {', '.join(noted)}."
    return "\n".join([text, *([""] if quoted else []), *(f"* {line}" for line in quoted)])


def _cell(found: dict[str, Any], key: str) -> str:
    if key not in found:
        return "fails" if "message" in found else "–"
    text = figure(found[key])
    if key == "median" and "quartiles" in found:
        low, high = found["quartiles"]
        text += f" ±{figure((high - low) / 2)}"
    return text


def proofs(parts: Iterable[dict[str, Any]]) -> str:
    """What was compared, how often, what was found and demanded; models in one row."""
    rows = [row for part in parts for row in part.get("rows", [])]
    models = [row for row in rows if MODEL.match(row["proof"])]
    body = [_proof(row) for row in rows if row not in models]
    if models:
        errors = [float(found[1]) for row in models if (found := ERROR.search(row["found"]))]
        body.append(
            _proof(
                {
                    "proof": f"replay: sums of {len(models)} models with and without a record",
                    "cases": sum(row["cases"] for row in models),
                    "found": f"off by {max(errors):.1e} C at most",
                    "demanded": "rounding, and no contribution above C",
                    "ok": all(row["ok"] for row in models),
                }
            )
        )
    return table(["proof", "cases", "found", "demanded", ""], body) if body else ""


def _proof(row: dict[str, Any]) -> list[str]:
    cells = [row["proof"], f"{row['cases']:,}", row["found"], row["demanded"], _verdict(row["ok"])]
    return [cell.replace("|", "\\|") for cell in cells]


def _verdict(ok: bool) -> str:
    return "holds" if ok else "**fails**"
