"""Forms: representations of n gradients that know their algebra."""

from .dense import Dense
from .form import BUDGET, Form, inner, lift, real, spans, wide
from .outer import Outer
from .part import Part
from .patches import Geometry, Patches
from .replay import Replay
from .rows import Rows
from .sketch import Sketch
from .total import Total, total

__all__ = [
    "BUDGET",
    "Dense",
    "Form",
    "Geometry",
    "Outer",
    "Part",
    "Patches",
    "Replay",
    "Rows",
    "Sketch",
    "Total",
    "inner",
    "lift",
    "real",
    "spans",
    "total",
    "wide",
]
