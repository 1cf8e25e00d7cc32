"""A form in numbers: what it keeps, and what its norms cost."""

from __future__ import annotations

from dataclasses import dataclass

from .form import Form


@dataclass(frozen=True, slots=True)
class Measure:
    """A form in numbers; ``norms`` and ``rows`` are how they are computed."""

    form: str
    norms: str
    work: int
    kept_bytes: int
    dense_bytes: int
    rows: str = ""


def measure_form(form: Form, whole: Form, *, joined: str = "", kept: bool = True) -> Measure:
    """The numbers of one use's form; ``whole`` is its parameter's form of all uses.

    ``joined``: how its norms are computed together with others.
    """
    return Measure(
        form=type(form).__name__,
        norms=joined or str(whole.plan()),
        work=form.work(),
        kept_bytes=form.nbytes() if kept else 0,
        dense_bytes=form.n * form.size * form.dtype.itemsize,
        rows=form.rows_by(),
    )
