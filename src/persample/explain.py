"""``tape.explain()``: every use, what is slow and why, and which sizes would become ambiguous."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import describe
from .forms import Form, within
from .inputs import Seen
from .use import Operand, Use

if TYPE_CHECKING:
    from .entries import Entry
    from .ledger import Ledger
    from .recorder import Recorder


@dataclass(frozen=True, slots=True)
class Measure:
    """A form in numbers; ``norms`` is the way in which its parameter's norms are taken."""

    form: str
    norms: str
    work: int
    kept_bytes: int
    dense_bytes: int


def measured(form: Form, whole: Form, *, kept: bool = True) -> Measure:
    """The numbers of one use's form; ``whole`` is its parameter's form of all uses."""
    return Measure(
        form=type(form).__name__,
        norms=str(whole.plan()),
        work=form.work(),
        kept_bytes=form.nbytes() if kept else 0,
        dense_bytes=form.n * form.size * form.dtype.itemsize,
    )


@dataclass(frozen=True, slots=True)
class UseRow:
    """One use of one parameter."""

    parameter: str
    aliases: tuple[str, ...]
    operator: str
    rule: str
    form: str
    operand: tuple[int, ...]
    output: tuple[int, ...]
    layout: str
    norms: str
    work: int
    kept_bytes: int
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
    kept_bytes: int = 0

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
                "products",
                "kept",
                "dense",
            )
        ]
        for u in self.uses:
            name = u.parameter + (f" (= {', '.join(u.aliases)})" if u.aliases else "")
            shapes = ("×".join(map(str, s)) for s in (u.operand, u.output))
            sizes = (f"{u.work:.1e}", readable(u.kept_bytes), readable(u.dense_bytes))
            rows.append((name, u.operator, u.rule, u.form, *shapes, u.layout, u.norms, *sizes))
        widths = [max(len(r[k]) for r in rows) for k in range(len(rows[0]))]
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


def readable(count: float) -> str:
    """Bytes with a unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def explain(recorder: Recorder, ledger: Ledger) -> Explanation:
    """Collect the rows."""
    aliases = recorder.parameters.aliases()
    rows: list[UseRow] = []
    reached: set[str] = set()
    slow: dict[str, None] = {}
    for use, operand, rule, measure in ledger.told or _told(recorder, ledger):
        names = ledger.sources(operand)
        reached.update(names)
        for name in names:
            derived = "" if operand.name else " (derived)"
            rows.append(_row(use, operand, rule, measure, name + derived, aliases.get(name, ())))
        if rule == "generic":
            slow[
                f"{use.operator} at {describe(use.place)}: no rule of its own, so its "
                "backward runs once per sample"
            ] = None
    without = tuple(name for name in recorder.parameters.selected if name not in reached)
    lines = [_ambiguity(seen, recorder) for seen in recorder.inputs.seen]
    return Explanation(
        n=recorder.n,
        uses=tuple(rows),
        without_gradient=without,
        slow=tuple(slow),
        ambiguous=tuple(line for line in lines if line),
        kept_bytes=_kept(ledger.entries),
    )


def _kept(entries: list[Entry]) -> int:
    """Bytes of what the forms hold: several may hold the same output gradient."""
    shared: dict[int, int] = {}
    own = 0
    for entry in entries:
        tensors = entry.form.tensors()
        if not tensors:
            own += entry.form.nbytes()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            shared[storage.data_ptr()] = storage.nbytes()
    return own + sum(shared.values())


def _told(recorder: Recorder, ledger: Ledger) -> Iterator[tuple[Use, Operand, str, Measure]]:
    """What was kept, and how the whole of each parameter would be asked."""
    if not ledger.entries:
        return
    whole = ledger.forms(recorder.parameters.selected)
    with within(recorder.budget):
        for entry in ledger.entries:
            names = ledger.sources(entry.operand)
            mine = whole[names[0]] if names else entry.form
            yield entry.use, entry.operand, entry.rule, measured(entry.form, mine)


def _row(
    use: Use, operand: Operand, rule: str, measure: Measure, name: str, aliases: tuple[str, ...]
) -> UseRow:
    return UseRow(
        parameter=name,
        aliases=aliases,
        operator=use.operator,
        rule=rule,
        form=measure.form,
        operand=tuple(operand.value.shape),
        output=tuple(use.tapped.shapes[0]),
        layout=repr(use.out_layouts[0])[7:-1],
        norms=measure.norms,
        work=measure.work,
        kept_bytes=measure.kept_bytes,
        dense_bytes=measure.dense_bytes,
        place=describe(use.place),
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
