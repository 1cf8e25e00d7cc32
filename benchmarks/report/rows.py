"""Markdown tables of results."""

from __future__ import annotations

import math
import statistics
from typing import Any

from ..peers import OWN

NAMES = (
    "persample", "persample, fresh", "persample, lean", "expanded weights", "vmap(grad)",
    "vmap(grad), chunked", "loop", "Opacus hooks", "Opacus ghost", "BackPACK",
    "opake", "dattri-llm",
)  # fmt: skip
PIECEWISE = ("vmap(grad), chunked", "loop")  # never hold the whole batch
Models = dict[str, Any]


def table(head: list[str], body: list[list[str]]) -> str:
    """A markdown table; refused where a row has more or fewer cells than the head."""
    if any(len(cells) != len(head) for cells in body):
        raise ValueError(f"the head {head} does not fit a row")
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def figure(value: float) -> str:
    """Three digits at most."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def answer(model: Any, peer: str, question: str) -> dict[str, Any]:
    """What a peer did; a peer that could not be built failed in every question."""
    cells = model.get("peers", {}).get(peer, {})
    found: dict[str, Any] = cells.get(question) or cells.get("all") or {}
    return found


def state(model: Any, peer: str, question: str) -> str:
    """Right, wrong, fails; empty if the peer does not offer the question."""
    return str(answer(model, peer, question).get("state", ""))


def written(cell: dict[str, Any], key: str, verdict: str) -> str:
    """A figure with its spread, or what went wrong."""
    if verdict == "fails" or ("message" in cell and key not in cell):
        return "fails"
    if key not in cell:
        return "–"
    text = figure(cell[key])
    if "quartiles" in cell:
        low, high = cell["quartiles"]
        text += f" ±{figure((high - low) / 2)}"
    if "note" in cell:
        text += " (once)"
    return f"wrong ({figure(cell[key])})" if verdict == "wrong" else text


def compared(model: Any, question: str, key: str, judged: Any) -> str:
    """Persample against the best correct peer."""
    names: tuple[str, ...] = ("persample",)
    if key == "ratio":  # buffers of an earlier step are memory, too; lean is there to need less
        first = "persample, fresh" if question == "grads" else "persample"
        names = (first, "persample, lean")
    own = min((answer(model, n, question) for n in names), key=lambda c: c.get(key, math.inf))
    rivals = {
        name: answer(model, name, question)
        for name in NAMES
        if name not in OWN
        and state(judged, name, question) == "right"
        and not (key == "ratio" and name in PIECEWISE)
    }
    rivals = {name: cell for name, cell in rivals.items() if key in cell}
    if key not in own or not rivals:
        return "–"
    if disturbed(model):
        return "not claimed: the machine was disturbed"
    best = min(rivals, key=lambda name: rivals[name][key])
    share = own[key] / rivals[best][key]
    if overlap(own, rivals[best]):  # neither side may claim what the spread does not carry
        return f"level with {best} within noise"
    if share <= 1:
        return f"ahead of {best}, {figure(share)}"
    return f"within 3 % of {best}" if share <= 1.03 else f"behind {best}, {figure(share)}"


def disturbed(model: Any) -> bool:
    """Whether other work, or something unknown, decided over the times of a model."""
    control = model.get("control", {}).get("median", 1.0)
    share = model.get("processor share", 1.0)
    return bool("message" in model or share < 0.9 or abs(control - 1) > 0.05)


def overlap(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether the quartile ranges of two cells meet."""
    if "quartiles" not in a or "quartiles" not in b:
        return False
    return bool(a["quartiles"][0] <= b["quartiles"][1] and b["quartiles"][0] <= a["quartiles"][1])


def question(models: Models, asked: str, key: str, judged: Models | None = None) -> str:
    """One question: models by peers."""
    names = [n for n in NAMES if any(answer(m, n, asked) for m in models.values())]
    again = ["plain again"] if any("control" in m for m in models.values()) else []
    body = []
    for name, model in models.items():
        truth = model if judged is None else judged.get(name, {})
        if "plain_ms" in model:
            plain = f"{figure(model['plain_ms'])} ms"
        elif "plain_bytes" in model:
            plain = f"{figure(model['plain_bytes'] / 2**20)} MiB"
        else:
            plain = "–"
        cells = [written(answer(model, p, asked), key, state(truth, p, asked)) for p in names]
        if again:
            cells = [written(model.get("control", {}), "median", ""), *cells]
        body.append([name, plain, *cells, compared(model, asked, key, truth)])
    return table(["model", "plain", *again, *names, "persample is"], body) if names else ""


def alive(models: Models) -> str:
    """Peak bytes against the plain step, as they are alive: both modes side by side."""
    body = []
    for name, model in models.items():
        cells = [
            written(answer(model, peer, asked), "ratio", "")
            for asked in ("norms", "clipped sum")
            for peer in ("persample", "persample, lean")
        ]
        body.append([name, f"{figure(model['plain_bytes'] / 2**20)} MiB", *cells])
    head = ["model", "plain", "norms", "norms, lean", "clipped sum", "clipped sum, lean"]
    return table(head, body) if body else ""


def messages(models: Models) -> str:
    """What failing and wrong peers said, once per text."""
    said: dict[tuple[str, str], list[str]] = {}
    for name, model in models.items():
        if "message" in model:
            rounds = model.get("rounds", 0)
            said["all", f"stopped after {rounds} rounds: {model['message']}"] = [name]
        for peer, cells in model.get("peers", {}).items():
            for asked, cell in cells.items():
                if cell.get("state") in ("fails", "wrong"):
                    where = name if asked == "all" else f"{name} {asked}"
                    text = f"{cell['state']}: {cell.get('message', '')}".replace("|", "\\|")
                    said.setdefault((peer, text), []).append(where)
    body = [[peer, ", ".join(where), f"`{text}`"] for (peer, text), where in said.items()]
    return table(["peer", "where", "message"], body) if body else ""


def short(models: Models, sizes: Models) -> str:
    """The table of the README: persample, and the best correct peer for the clipped sum."""
    body = []
    for name, model in models.items():
        rivals = {
            p: answer(model, p, "clipped sum")["median"]
            for p in NAMES
            if p not in OWN
            and state(model, p, "clipped sum") == "right"
            and "median" in answer(model, p, "clipped sum")
        }
        best = min(rivals, key=lambda p: rivals[p]) if rivals else ""
        time = [answer(model, "persample", q).get("median") for q in ("norms", "clipped sum")]
        size = answer(sizes.get(name, {}), "persample", "clipped sum").get("ratio")
        figures = [figure(v) if v is not None else "–" for v in (*time, size)]
        rival = f"{figure(rivals[best])} {best}" if best else "–"
        body.append([name, *figures[:2], rival, figures[2]])
    head = ["model", "norms", "clipped sum", "best correct peer, clipped sum", "peak memory"]
    return table(head, body) if body else ""


def own(models: Models) -> str:
    """Persample alone, every question: for regimes in which no peer was measured."""
    columns = [
        ("grads", "persample"), ("grads, fresh", "persample, fresh"), ("norms", "persample"),
        ("norms, lean", "persample, lean"), ("clipped sum", "persample"),
        ("clipped sum, lean", "persample, lean"), ("three questions", "persample"),
    ]  # fmt: skip
    body = []
    for name, model in models.items():
        cells = [answer(model, peer, head.split(",")[0]) for head, peer in columns]
        plain = f"{figure(model['plain_ms'])} ms" if "plain_ms" in model else "–"
        body.append([name, plain, *[written(cell, "median", "") for cell in cells]])
    return table(["model", "plain", *[head for head, _ in columns]], body) if body else ""


def growth(scale: dict[str, Any]) -> str:
    """Exponents of every axis."""
    body = []
    for axis, found in scale.items():
        sizes = [p["size"] for p in found["points"]]
        fixed = ", ".join(f"{k} = {v}" for k, v in found["fixed"].items())
        for kind, label in (("ms", "time"), ("bytes", "memory")):
            values = [f"{value:.2f}" for value in found["exponents"][kind].values()]
            body.append([f"{axis} = {sizes[0]}…{sizes[-1]} ({fixed})", label, *values])
    steps = list(next(iter(scale.values()))["exponents"]["ms"]) if scale else []
    return table(["axis", "exponent of", *steps], body) if body else ""


def overhead(found: dict[str, Any]) -> str:
    """Microseconds per use and operator, and the tiny model."""
    body = []
    for name in ("per use", "per data operator"):
        if name in found:
            noisy = "" if found[name]["correlation"] > 0.9 else " (not linear: too noisy to claim)"
            body.append([f"recording, {name}", f"{found[name]['us']:.1f} µs{noisy}"])
    for name in ("recording", "norms", "clipped sum"):
        if "tiny GPT-2" in found:
            body.append([f"tiny GPT-2, {name}", f"{found['tiny GPT-2'][name]:.2f} of plain"])
    return table(["what", "cost"], body) if body else ""


def parts(found: dict[str, Any]) -> str:
    """Where the time of a step goes."""
    body = [
        [name, *[f"{value:.0f} ms" for value in spent.values()]]
        for name, spent in found.get("parts", {}).items()
    ]
    heads = list(next(iter(found["parts"].values()))) if body else []
    return table(["model", *heads], body) if body else ""


def steps(found: dict[str, Any]) -> str:
    """What a step consists of, what its kernels alone take, and what a program by hand takes."""
    timed = ("no weight gradients", "recording", "norms", "clipped sum", "grads")
    hand = [f"{question}, by hand" for question in ("norms", "clipped sum")]
    body = []
    for name, spent in found.get("steps", {}).items():
        values = [spent[k] for k in timed] + [spent["kernels"][k] for k in timed[1:]]
        values += [spent[k] for k in hand if k in spent]
        cells = [f"{v:.2f}" for v in values] + ["–" for k in hand if k not in spent]
        body.append([name, f"{figure(spent['plain_ms'])} ms", *cells])
    head = ["model", "plain", *timed, *(f"{k}, kernels" for k in timed[1:]), *hand]
    return table(head, body) if body else ""


def surroundings(found: dict[str, Any]) -> str:
    """What the numbers were measured on."""
    body = [
        [part, key, *(str(where.get(k)) for k in ("processor", "kernels", "usable cores", "torch"))]
        for part, regimes in found.items()
        for key, where in regimes.items()
    ]
    head = ["part", "regime", "processor", "kernels", "usable cores", "torch"]
    return table(head, body) if body else ""


def headline(models: Models, sizes: Models) -> dict[str, tuple[int, float, float]]:
    """By peer: models with a right clipped sum, and median time and peak memory over persample's.

    Times of disturbed models are left out, and so are peers that go through the batch piecewise.
    """
    asked, found = "clipped sum", {}
    for peer in NAMES:
        if peer in PIECEWISE or (peer in OWN and peer != "persample"):
            continue
        runs = [name for name, m in models.items() if state(m, peer, asked) == "right"]
        times = [
            answer(models[name], peer, asked)["median"]
            / answer(models[name], "persample", asked)["median"]
            for name in runs
            if not disturbed(models[name]) and "median" in answer(models[name], peer, asked)
        ]
        peaks = [
            answer(sizes[name], peer, asked)["ratio"]
            / answer(sizes[name], "persample", asked)["ratio"]
            for name in runs
            if name in sizes and "ratio" in answer(sizes[name], peer, asked)
        ]
        if times and peaks:
            found[peer] = (len(runs), statistics.median(times), statistics.median(peaks))
    return found


def beside(models: Models, sizes: Models) -> str:
    """The table of the README: every library in three numbers."""
    body = [
        [peer, f"{count} of {len(models)}", f"{figure(time)}×", f"{figure(peak)}×"]
        for peer, (count, time, peak) in headline(models, sizes).items()
    ]
    return table(["", "models it runs", "time", "peak memory"], body) if body else ""
