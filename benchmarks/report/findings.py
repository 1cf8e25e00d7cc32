"""Tables of what is measured beside the peers: small models, the drop-in, suspects, guards."""

from __future__ import annotations

from typing import Any

from .rows import table


def drop_in(found: dict[str, Any]) -> str:
    """PyTorch's expanded weights and ours, step by step."""
    head = ["model", "plain, ms", "original, ms", "here, ms", "times faster"]
    body = []
    for name, model in found.get("models", {}).items():
        ms, peak = model["ms"], model["peak_mib"]
        times = [f"{ms[key]:.1f}" for key in ("plain", "original", "ours")]
        sizes = [f"{peak[key]:.1f}" for key in ("original", "ours")]
        body.append([name, *times, f"{model['speedup']:.2f}", *sizes])
    return table([*head, "original, peak MiB", "here, peak MiB"], body) if body else ""


def suspects(found: dict[str, Any]) -> str:
    """How well changed labels are found, by data set and checkpoint."""
    head = ["data set", "checkpoint", "loss", "norm", "suspicion", "suspicion − loss"]
    head += ["suspicion − norm", "found among as many: loss", "suspicion"]
    body = []
    for name, checkpoints in found.get("summary", {}).items():
        for checkpoint, result in checkpoints.items():
            scores = [f"{result['auroc'][key]:.4f}" for key in ("loss", "norm", "suspicion")]
            gaps = [_interval(result[f"suspicion - {key}"]) for key in ("loss", "norm")]
            parts = [f"{result['precision'][key]:.0%}" for key in ("loss", "suspicion")]
            said = f"{result['vote is the true label']:.0%}"
            body.append([name, checkpoint, *scores, *gaps, *parts, said])
    return table([*head, "neighbours say the true label"], body) if body else ""


def _interval(gap: dict[str, float]) -> str:
    mean, low, high = (f"{gap[key]:+.4f}".replace("-", "−") for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def inspecting(found: dict[str, Any]) -> str:
    """One inspection against one plain epoch."""
    body = []
    for name, case in found.get("cases", {}).items():
        low, high = case["spread"]
        parts = [f"{share:.2f}" for share in case["parts of an epoch"].values()]
        body.append([name, f"{case['ratio']:.2f} ({low:.2f} to {high:.2f})", *parts])
    head = ["", "of an epoch", "recording", "norms", "projections", "comparing", "the rest"]
    return table(head, body) if body else ""


def guards(found: dict[str, Any]) -> str:
    """How often each guard looked and refused, and what its programs do without it."""
    keys = ("looked", "refused", "wrong without it", "refused by another", "right without it")
    body = []
    for name, row in found.get("guards", {}).items():
        counts = [f"{row[key]:,}" for key in keys[:2]]
        rest = [str(row[key]) if row["can be off"] else "" for key in (*keys[2:], "something else")]
        body.append([name, f"`{row['file']}`" if row["file"] else "", *counts, *rest])
    head = ["guard", "in", "looked", "refused", "wrong without it", "refused by another"]
    return table([*head, "right without it", "other"], body) if body else ""


def small(found: dict[str, Any]) -> str:
    """Small models, the median and the 90th percentile first."""
    body = []
    for line in ("median", "90th percentile"):
        values = [f"**{each[line]:.2f}**" for each in found.get("summary", {}).values()]
        body.append([f"**{line}**", "", "", *(values or ["", ""])])
    for name, model in found.get("models", {}).items():
        if "plain_ms" not in model:
            body.append([name, "", "", model["state"], model.get("message", "")])
            continue
        values = [f"{model[key]:.2f}" for key in ("norms", "clipped sum")]
        body.append([name, f"{model['parameters']:,}", f"{model['plain_ms']:.2f} ms", *values])
    head = ["model", "parameters", "plain", "norms", "clipped sum"]
    return table(head, body) if found else ""


def budgets(found: dict[str, Any]) -> str:
    """The clipped sum by budget: time, and peak memory behind it."""
    body = []
    for name, model in found.items():
        cells = [f"{c['time']:.2f} ({c['memory']:.2f})" for c in model["budgets"].values()]
        plain = f"{model['plain_ms']:.0f} ms, {model['plain_bytes'] >> 20} MiB"
        body.append([name, plain, *cells])
    heads = list(next(iter(found.values()))["budgets"]) if found else []
    return table(["model", "plain", *heads], body) if found else ""


def processes(found: dict[str, Any]) -> str:
    """Clipped sums under DDP against plain DDP, by the number of processes."""
    body = []
    for name, worlds in found.items():
        for world, cell in worlds.items():
            speed = f"{cell['samples per second']:.0f}"
            ratios = [
                f"{cell[key]:.2f}"
                for key in ("clipped sum, then reduced", "clipped sum, overlapped")
            ]
            body.append([name, world, f"{cell['plain_ms']:.0f} ms", speed, *ratios])
    head = ["model", "processes", "plain DDP", "samples per second", "clipped sum, then reduced"]
    return table([*head, "overlapped"], body) if found else ""
