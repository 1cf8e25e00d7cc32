"""``tape.explain()``: every use, what is slow and why, and which sizes would become ambiguous."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ..backward.consumers.lean import Lean, Told
from ..errors import describe
from ..forms import name_joined, within
from ..forms.measure import Measure, measure_form
from ..inputs.inputs import Seen
from ..recording.recorder import Recording
from .answers import ParameterForms


@dataclass(frozen=True, slots=True, kw_only=True)
class UseRow(Measure):
    """One use of one parameter."""

    parameter: str
    aliases: tuple[str, ...]
    operator: str
    rule: str
    operand: tuple[int, ...]
    output: tuple[int, ...]
    layout: str
    place: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was recorded. ``str()`` of it is a table."""

    n: int | None
    uses: tuple[UseRow, ...]
    without_gradient: tuple[str, ...]
    slow: tuple[str, ...]
    ambiguous: tuple[str, ...]
    kept_bytes: int = 0
    numbers: tuple[str, ...] = ()

    @property
    def bytes_per_sample(self) -> float:
        """Bytes that the tape keeps for each sample, tensors shared by several uses once."""
        return self.kept_bytes / self.n if self.n else 0.0

    def __str__(self) -> str:
        lines = [
            f"n = {self.n}, {len(self.uses)} uses, {readable(self.kept_bytes)} kept, "
            f"{readable(self.bytes_per_sample)} per sample"
        ]
        rows: list[tuple[str, ...]] = [
            (
                "parameter",
                "operator",
                "rule",
                "form",
                "shape",
                "output",
                "samples",
                "norms by",
                "rows by",
                "products",
                "kept",
                "dense",
            )
        ]
        for u in self.uses:
            name = u.parameter + (f" (= {', '.join(u.aliases)})" if u.aliases else "")
            shapes = ("×".join(map(str, s)) for s in (u.operand, u.output))
            sizes = (f"{u.work:.1e}", readable(u.kept_bytes), readable(u.dense_bytes))
            rows.append(
                (name, u.operator, u.rule, u.form, *shapes, u.layout, u.norms, u.rows, *sizes)
            )
        widths = [max(len(r[k]) for r in rows) for k in range(len(rows[0]))]
        lines += [
            "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows
        ]
        for title, items in (
            ("no gradient reached", self.without_gradient),
            ("slow", self.slow),
            ("ambiguous at other sizes", self.ambiguous),
            ("numbers taken out of tensors of several samples", self.numbers),
        ):
            if items:
                lines.append(f"{title}:")
                lines += [f"  {item}" for item in items]
        return "\n".join(lines)


def readable(count: float) -> str:
    """Bytes with a unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def explain(recording: Recording, forms: ParameterForms | None) -> Explanation:
    """Every use of every parameter; ``forms`` are those that were kept."""
    context, inputs = recording.context, recording.inputs
    parameters, aliases = context.parameters, context.parameters.aliases()
    rows: list[UseRow] = []
    reached: set[str] = set()
    slow: dict[str, None] = {}
    for use, operand, rule, measure in _measured_uses(recording, forms):
        names = [n for n in recording.collector.sources(operand) if n in parameters.asked]
        reached.update(names)
        for name in names:
            derived = "" if operand.name else " (derived)"
            rows.append(
                UseRow(
                    parameter=name + derived,
                    aliases=aliases.get(name, ()),
                    operator=use.operator,
                    rule=rule,
                    operand=tuple(operand.value.shape),
                    output=tuple(use.tapped.shapes[0]),
                    layout=repr(use.out_layouts[0])[7:-1],
                    place=describe(use.place),
                    **asdict(measure),
                )
            )
        if rule == "generic":
            slow[
                f"{use.operator} at {describe(use.place)}: no rule of its own, so its "
                "backward runs once per sample"
            ] = None
    lines = [_ambiguity(seen, inputs.dim, context.n) for seen in inputs.seen]
    return Explanation(
        n=context.n,
        uses=tuple(rows),
        without_gradient=tuple(name for name in parameters.asked if name not in reached),
        slow=tuple(slow),
        ambiguous=tuple(line for line in lines if line),
        kept_bytes=0 if forms is None else forms.held(),
        numbers=tuple(recording.guards.numbers.listed()),
    )


def _measured_uses(recording: Recording, forms: ParameterForms | None) -> Iterator[Told]:
    """What was kept, and how each parameter's norms would be computed."""
    context, collector = recording.context, recording.collector
    if isinstance(collector.consumer, Lean):
        yield from collector.consumer.told
    if forms is None or not forms.contributions:
        return
    whole = forms.forms(context.parameters.selected)
    with within(context.options.budget):
        joined = name_joined(whole)
        for entry in forms.contributions:
            name = next(iter(collector.sources(entry.operand)), "")
            mine, way = whole.get(name, entry.form), joined.get(name, "")
            measure = measure_form(entry.form, mine, joined=way)
            yield entry.use, entry.operand, entry.rule, measure


def _ambiguity(seen: Seen, dim: int, n: int | None) -> str | None:
    """An undeclared input whose meaning rests on a size."""
    if seen.declared or len(seen.shape) <= dim or n is None:
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
            f"{seen.path} {seen.shape} is read as samples because axis {dim} has size n; if it is "
            f"not per-sample data: {cure}"
        )
    return None
