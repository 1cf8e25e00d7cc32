"""``tape.explain()``: every use, what is slow and why, and which sizes would become ambiguous."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .errors import describe
from .inputs import Seen
from .use import Operand, Use

if TYPE_CHECKING:
    from .recorder import Recorder


@dataclass(frozen=True, slots=True)
class UseRow:
    """One use of one parameter."""

    parameter: str
    aliases: tuple[str, ...]
    operator: str
    rule: str
    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    layout: str
    factor_bytes: int
    dense_bytes: int
    place: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was recorded. ``str()`` of it is a table."""

    n: int | None
    uses: tuple[UseRow, ...]
    without_gradient: tuple[str, ...]
    slow: tuple[str, ...]
    ambiguous: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"n = {self.n}, {len(self.uses)} uses"]
        head = ("parameter", "operator", "rule", "inputs", "output", "layout", "kept", "dense")
        rows = [head]
        for u in self.uses:
            name = u.parameter + (f" (= {', '.join(u.aliases)})" if u.aliases else "")
            inputs = " ".join("×".join(map(str, s)) for s in u.inputs)
            output = "×".join(map(str, u.output))
            rows.append(
                (
                    name,
                    u.operator,
                    u.rule,
                    inputs,
                    output,
                    u.layout,
                    _size(u.factor_bytes),
                    _size(u.dense_bytes),
                )
            )
        widths = [max(len(r[k]) for r in rows) for k in range(len(head))]
        lines += [
            "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows
        ]
        for title, items in (
            ("no gradient reached", self.without_gradient),
            ("slow", self.slow),
            ("ambiguous at other sizes", self.ambiguous),
        ):
            if items:
                lines.append(f"{title}:")
                lines += [f"  {item}" for item in items]
        return "\n".join(lines)


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def explain(recorder: Recorder, uses: list[Use]) -> Explanation:
    """Collect the rows."""
    aliases = recorder.parameters.aliases()
    rows: list[UseRow] = []
    reached: set[str] = set()
    slow: list[str] = []
    for use in uses:
        for operand in use.operands:
            name = operand.name or "derived from parameters"
            if operand.name is None and operand.edge is None:
                continue
            reached.update([operand.name] if operand.name else sources(recorder, operand))
            rows.append(_row(recorder, use, name, aliases.get(name, ()), operand.value.shape))
        rule = rule_name(recorder, use)
        if rule == "generic":
            slow.append(
                f"{use.operator} at {describe(use.place)}: no rule of its own, so its backward "
                "runs once per sample"
            )
    without = tuple(name for name in recorder.parameters.selected if name not in reached)
    ambiguous = tuple(
        line for seen in recorder.inputs.seen if (line := _ambiguity(seen, recorder)) is not None
    )
    return Explanation(recorder.n, tuple(rows), without, tuple(dict.fromkeys(slow)), ambiguous)


def rule_name(recorder: Recorder, use: Use) -> str:
    """The name of the rule that answers for a use."""
    rule = recorder.rules.get(use.operator)
    return "generic" if rule is None else str(getattr(rule, "__name__", rule))


def sources(recorder: Recorder, operand: Operand) -> list[str]:
    """The parameters that a derived tensor was computed from."""
    if operand.edge is None:
        return []
    selected = recorder.parameters.selected
    with torch._C.DisableTorchFunction():
        found = torch.autograd.grad(
            operand.edge,
            list(selected.values()),
            torch.zeros_like(operand.value),
            retain_graph=True,
            allow_unused=True,
        )
    return [name for name, f in zip(selected, found, strict=True) if f is not None]


def _row(
    recorder: Recorder, use: Use, name: str, aliases: tuple[str, ...], shape: tuple[int, ...]
) -> UseRow:
    firing = use.firings[-1] if use.firings else None
    kept = 0
    inputs: tuple[tuple[int, ...], ...] = ()
    if firing is not None:
        tensors = [*firing.saved, *(g for g in firing.grads if g is not None)]
        kept = sum(t.numel() * t.element_size() for t in tensors)
        inputs = tuple(tuple(t.shape) for t in firing.saved)
    size = 1
    for s in shape:
        size *= s
    return UseRow(
        name,
        aliases,
        use.operator,
        rule_name(recorder, use),
        inputs,
        tuple(use.out_shapes[0]) if use.out_shapes else (),
        repr(use.out_layouts[0])[7:-1] if use.out_layouts else "",
        kept,
        size * (recorder.n or 0) * use.operands[0].value.element_size(),
        describe(use.place),
    )


def _ambiguity(seen: Seen, recorder: Recorder) -> str | None:
    """An undeclared input whose meaning rests on a size."""
    dim = recorder.inputs.dim
    if seen.declared or len(seen.shape) <= dim or recorder.n is None:
        return None
    name, size = seen.path.split(".")[0], seen.shape[dim]
    cure = f'record(..., constants=("{name}",))'
    if not seen.samples and size != 1:
        return (
            f"{seen.path} {seen.shape} is a constant because axis {dim} has size {size}, not n; a "
            f"batch of {size} would make it samples: {cure}"
        )
    if seen.samples and len(seen.shape) == 2 and seen.shape[0] == seen.shape[1]:
        return (
            f"{seen.path} {seen.shape} is taken as samples because axis {dim} has size n; if it is "
            f"not per-sample data: {cure}"
        )
    return None
